"""Simulated engines of benchmarks.asynchronous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.asynchronous.clock import SLOTS, SimulatedClock, SimulatedEngine, step_seconds
from benchmarks.asynchronous.simulation import SAMPLES, Setting, simulate
from mcore_rl.rollout.tasks import Until
from mcore_rl.types import RolloutTask, SamplingOptions


@dataclass
class Caller:
    """Fake driver: it has one pending call at an engine, which ends when a task ends, and then sends the next one."""

    clock: SimulatedClock
    engine: SimulatedEngine
    own: list[Any] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)
    """Time at which each group ended."""

    def calls(self) -> list[Any]:
        return list(self.own)

    def ended(self, calls: Sequence[Any]) -> None:
        for call in calls:
            self.own.remove(call)
            report = self.clock.value(call)
            if report is not None:
                self.ends |= {number: self.clock.now for number, _, _ in report.ended}
                self.own.append(self.engine.run.remote([], Until.ANY, []))


def caller_of(lengths: list[list[int]], directory: Path) -> Caller:
    clock = SimulatedClock(np.array(lengths, np.int32))
    caller = clock.attendant = Caller(clock, SimulatedEngine(clock, directory))
    caller.own.append(caller.engine.run.remote([], Until.ANY, []))
    return caller


def tasks(numbers: Sequence[int], directory: Path) -> list[tuple[int, RolloutTask]]:
    options = SamplingOptions(8)
    ids = {number: np.array([number]) for number in numbers}
    return [
        (number, RolloutTask("train", row, row, 2, options, 1, str(directory / f"part_{number}")))
        for number, row in ids.items()
    ]


def wait_for(caller: Caller, groups: int) -> None:
    while len(caller.ends) < groups:
        caller.clock.wait([], 0)


def test_engine_step_time_depends_only_on_its_requests(tmp_path: Path) -> None:
    caller = caller_of([[10, 30], [20, 20]], tmp_path)
    clock = caller.clock
    caller.own.append(caller.engine.begin.remote(tasks([0], tmp_path)))
    # 10 steps of two requests; then the longer one decodes alone for the time of 5 steps of two.
    clock.get([clock.after(15 * step_seconds(2))])
    alone = 5 * step_seconds(2) / step_seconds(1)
    caller.own.append(caller.engine.begin.remote(tasks([1], tmp_path)))
    wait_for(caller, 2)
    left = 20 - alone  # tokens of the first group, decoded with the second group, which afterwards decodes alone
    assert caller.ends[0] == pytest.approx(15 * step_seconds(2) + left * step_seconds(3))
    assert caller.ends[1] == pytest.approx(caller.ends[0] + (20 - left) * step_seconds(2))
    assert caller.engine.busy_seconds == pytest.approx(caller.ends[1])


def test_requests_beyond_the_slots_begin_when_others_have_ended(tmp_path: Path) -> None:
    caller = caller_of([[5] * (SLOTS - 1) + [9], [3] * SLOTS], tmp_path)
    caller.own.append(caller.engine.begin.remote(tasks([0], tmp_path)))
    caller.own.append(caller.engine.begin.remote(tasks([1], tmp_path)))
    wait_for(caller, 2)
    # After 5 tokens, 63 requests of the second group start, and after 8 tokens its last one.
    assert caller.ends[0] == pytest.approx(8 * step_seconds(SLOTS) + step_seconds(2))
    assert caller.ends[1] == pytest.approx(caller.ends[0] + 2 * step_seconds(1))


@pytest.mark.parametrize(("eta", "hard"), [(0, 2), (1, 1), (2, 4)])
def test_simulated_run_trains_whole_steps_within_the_bound(eta: int, hard: int) -> None:
    measured = simulate(Setting(2, eta, hard, 20))
    groups = Setting(2, eta, hard, 20).prompts_per_step
    assert measured.ages.total() == 20 * groups == measured.responses // SAMPLES
    assert eta <= max(measured.ages) <= hard if eta else set(measured.ages) == {0}
    assert all(seconds > 0 for seconds in measured.driver_seconds)


def test_asynchronous_run_waits_less_than_a_synchronous_one() -> None:
    synchronous, ahead = simulate(Setting(2, 0, 2, 20)), simulate(Setting(2, 1, 3, 20))
    longest = synchronous.clock.lengths[: Setting(2, 0, 2, 20).prompts_per_step].max()
    assert synchronous.waited[0] >= longest * step_seconds(1)
    assert ahead.pace > 1.5 * synchronous.pace
