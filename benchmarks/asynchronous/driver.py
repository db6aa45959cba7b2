"""Driver cost and speedup of asynchronous rollouts, with the real admission, collector, fleet and scheduler.

A clock simulates the engines (benchmarks.asynchronous.clock). A training step takes as long as the generation of its
batch on fully busy engines. CPU time is measured on the driver's thread without the clock; Ray calls are measured
separately. Speeds and staleness refer to simulated time.
"""

from __future__ import annotations

from benchmarks.asynchronous.ray_costs import RayCosts, ray_costs
from benchmarks.asynchronous.simulation import SAMPLES, Setting, SimulationResult, simulate
from benchmarks.result import Result, compare
from benchmarks.sizes import size

LIMIT_SECONDS = 0.05
"""Limit in CPU seconds per 1,000 responses: 5 % of a core at 1,000 responses per second."""
LIMIT_GROWTH = 1.3
"""Maximum growth of the cost per response during a run; a driver that keeps old groups would exceed it."""
STEPS = size({8: 1000, 64: 150, 512: 30}, {2: 20})
"""Steps of runs that measure CPU time, by number of engines."""
SHORT_STEPS = size({8: 100, 64: 30, 512: 10}, {2: 10})
"""Steps of the other runs, by number of engines."""
USUAL = (2, 4)
IN_ORDER = (2, 2)
BOUNDS = ((1, 1), (1, 3), (2, 2), (2, 3), (2, 4), (2, 6), (4, 4), (4, 6), (4, 8))
"""rollout.max_staleness and rollout.max_staleness_hard."""
LOOKS_PER_WAIT = 2
"""Maximum number of times that Watch.wait checks all calls."""


def run() -> list[Result]:
    costs, results = ray_costs(list(STEPS), SAMPLES), []
    for engines, steps in STEPS.items():
        short = SHORT_STEPS[engines]
        usual, in_order = simulate(Setting(engines, *USUAL, steps)), simulate(Setting(engines, *IN_ORDER, short))
        results += [_cpu(usual), _cpu(in_order), _growth(usual), _ray(usual, costs)]
        synchronous = simulate(Setting(engines, 0, 2, short))
        others = [simulate(Setting(engines, eta, eta + 2, short)) for eta in (1, 4)]
        results += [_speed(measured, synchronous) for measured in (others[0], usual, others[1])]
    few = min(STEPS)
    results += [_oldest(simulate(Setting(few, *bounds, SHORT_STEPS[few]))) for bounds in BOUNDS]
    return results


def _named(measured: SimulationResult) -> str:
    setting = measured.setting
    bounds = f"{setting.max_staleness}, {setting.max_staleness_hard}"
    return f"{setting.engines} engines, staleness {bounds if setting.max_staleness else 0}"


def _cpu(measured: SimulationResult) -> Result:
    seconds, clock = measured.cpu_per_1000, measured.clock
    note = (
        f"{measured.responses} responses; per 1,000: {measured.per_1000(clock.waits):.0f} waits, "
        f"{measured.per_1000(clock.calls):.0f} calls, and {measured.per_1000(clock.meter.clock_seconds):.4f} CPU s of "
        f"the clock\nat {measured.pace:.0f} responses per second, {measured.pace * seconds / 1000:.2%} of a core"
    )
    name = f"driver per 1,000 responses, {_named(measured)}"
    return compare(name, seconds, LIMIT_SECONDS, "CPU s", "<= 1.0", note)


def _growth(measured: SimulationResult) -> Result:
    name = f"last tenth of {measured.setting.steps} steps beside the second, {_named(measured)}"
    # The first tenth warms up.
    late, early = measured.cpu_in_tenth(10), measured.cpu_in_tenth(2)
    return compare(name, late, early, "CPU s", f"<= {LIMIT_GROWTH}", "medians of steps, per 1,000 responses")


def _ray(measured: SimulationResult, costs: RayCosts) -> Result:
    """Estimate the cost of Ray: number of calls and checks in the simulated run times their measured cost."""
    calls, looks = measured.per_1000(measured.clock.calls), LOOKS_PER_WAIT * measured.per_1000(measured.clock.waits)
    look = costs.look[measured.setting.engines]
    seconds = calls * costs.call + looks * look
    of_looks = f"at most {looks:.0f} looks of {look * 1e6:.0f} us"
    note = f"{calls:.0f} calls of {costs.call * 1e6:.0f} us and {of_looks}, in CPU time"
    name = f"Ray beside it per 1,000 responses, {_named(measured)}"
    return compare(name, seconds, measured.cpu_per_1000, "CPU s", note=note)


def _speed(measured: SimulationResult, synchronous: SimulationResult) -> Result:
    """Compare with the synchronous run, which waits for its longest response before it trains."""
    note = f"the trainer waits {measured.trainer_waits:.0%} of the time (synchronous: {synchronous.trainer_waits:.0%})"
    name = f"speed beside a synchronous run, {_named(measured)}"
    return compare(name, measured.pace, synchronous.pace, "responses/s", note=note)


def _oldest(measured: SimulationResult) -> Result:
    oldest, bound = max(measured.ages), measured.setting.max_staleness_hard
    total = measured.ages.total()
    ages = ", ".join(f"{age}: {groups / total:.3f}" for age, groups in sorted(measured.ages.items()))
    note = f"mean {measured.mean_age:.2f}; {ages}; {measured.pace:.2f} responses per second"
    return compare(f"oldest group, {_named(measured)}", oldest, bound, "versions", "<= 1.0", note)
