"""Driver work in a step of 8,192 prompts x 16 samples with 64 engines and 64 data-parallel ranks.

There is no model: engines and ranks return at once, and everything else runs as in a real run. Rows `in process`
measure the driver's own work. Rows `through Ray` add the real calls to engines and to 64 or 512 trainer ranks, eight
per node. The ranks are handles of four processes, so that this machine does not have to start hundreds. The wall-clock
time includes the time in which these four unpack their arguments; on a cluster, other hosts would do this in parallel.
A separate row, with one process per rank, measures how long a node takes to forward a call to its ranks. Episodes have
2 sequences on average, each trained like a response, and metrics of turns and tools.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.driver.load import DP_RANKS, LONGEST, PROMPTS, SAMPLES, ReadyPool, SilentRanks, make_episodes
from benchmarks.driver.ray_ranks import RANKS_PER_NODE, ray_groups, seconds_to_pass_on
from benchmarks.result import Result, compare, shares
from benchmarks.sizes import size
from mcore_rl.algorithms.filters import groups_with_variance
from mcore_rl.config.schema import Config
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.observe.journal import RunJournal
from mcore_rl.rollout.collector import GroupSource, RolloutCollector
from mcore_rl.rollout.results import GradingFailures
from mcore_rl.runtime.engines.scheduler import Scheduler
from mcore_rl.runtime.roles.trainer import TrainerGroup
from mcore_rl.runtime.spans import SpanRecorder
from mcore_rl.trainer.batches import batch_builder, describe

PROMPTS_PER_UPDATE = size(512, 16)
STEPS = size(7, 1)
PEERS = size((1, 8), (2,))
"""Numbers of tensor and pipeline peers, which receive the same share."""
LIMIT_SECONDS = 1.0
"""Limit for the driver's time per step; the aim for episodes is twice as long."""


def run() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="mcore_rl_driver_") as directory:
        run_dir = Path(directory)
        results = [_measure("in process", run_dir / "local", ReadyPool(run_dir / "local"), SilentRanks(), "<= 1.0")]
        for peers in PEERS:
            name = f"through Ray, {DP_RANKS * peers} trainer ranks"
            with ray_groups(peers) as (pool, ranks):
                results.append(_measure(name, run_dir / f"ray{peers}", pool, ranks, "<= 1.0"))
        ready = ReadyPool(run_dir / "episodes", make_episodes)
        results.append(_measure("episodes, in process", run_dir / "episodes", ready, SilentRanks(), "<= 2.0"))
        with ray_groups(1, make_episodes) as (pool, ranks):
            name = f"episodes, through Ray, {DP_RANKS} trainer ranks"
            results.append(_measure(name, run_dir / "ray_episodes", pool, ranks, "<= 2.0"))
    seconds = seconds_to_pass_on(50)
    name = f"a call passed on to the {RANKS_PER_NODE} ranks of a node"
    note = "adds to the wall clock of the rows through Ray once per call, for any number of nodes"
    return [*results, compare(name, seconds * 1000, LIMIT_SECONDS * 1000, "ms", note=note)]


def _measure(
    name: str, run_dir: Path, pool: ReadyPool | Scheduler, ranks: SilentRanks | TrainerGroup, aim: str
) -> Result:
    """Measure the median wall-clock time of a step, without the simulated engines of this process."""
    driver = Driver(run_dir, pool, ranks)
    steps = [driver.step(step) for step in range(1, STEPS + 2)][1:]  # the first step includes imports and compilation
    driver.journal.close()
    # One real step, so that its phases add up to its time; medians of the phases would not.
    by_total = sorted(steps, key=lambda step: sum(step.phases.values()))
    typical = by_total[len(by_total) // 2]
    seconds = sum(typical.phases.values())
    cpu = statistics.median(step.cpu_seconds for step in steps)
    note = f"the driver's wall clock: {shares(list(typical.phases.items()))}; its CPU time {cpu:.2f} s"
    return compare(name, seconds, LIMIT_SECONDS, "s/step", aim, note)


@dataclass(frozen=True)
class DriverSeconds:
    """Units: seconds; phases of the wall clock, and the CPU time of this process."""

    phases: dict[str, float]
    cpu_seconds: float


@dataclass
class Driver:
    """Runs steps like trainer.loop and times each phase."""

    run_dir: Path
    pool: ReadyPool | Scheduler
    ranks: SilentRanks | TrainerGroup
    journal: RunJournal = field(init=False)

    def __post_init__(self) -> None:
        records = self.run_dir / "rollouts"
        records.mkdir(parents=True)
        config = large_config(self.run_dir)
        self.collector = RolloutCollector(
            self.pool,
            GroupSource(
                sampler=PromptSampler(PROMPTS * 16, config.run.seed, True),
                rollout=config.rollout,
                dynamic=config.algorithm.dynamic_sampling,
                has_signal=groups_with_variance,
                prompts_per_step=PROMPTS,
                seed=config.run.seed,
                records_dir=records,
                failures=GradingFailures(config.reward, print),
            ),
        )
        self.batch_of = batch_builder(config, DP_RANKS)
        self.journal = RunJournal(self.run_dir, STEPS + 1, SpanRecorder("driver").drain, [])
        self.journal.resume_after(-1)  # a new run

    def step(self, step: int) -> DriverSeconds:
        """Run a step. Time that the in-process pool spends on its simulated results is subtracted."""
        seconds: dict[str, float] = {}
        cpu_started = time.process_time()
        with _timed(seconds, "collect"):
            groups = self.collector.collect(step)
        wall, cpu = self.pool.seconds_pretending() if isinstance(self.pool, ReadyPool) else (0.0, 0.0)
        # On a cluster, other hosts would spend this time.
        seconds["collect"] -= wall
        with _timed(seconds, "batch"):
            batch = self.batch_of(groups, step, step - 1)
        with _timed(seconds, "logp"):
            logp = self.ranks.recompute_logp(batch)
        with _timed(seconds, "update"):
            updated = self.ranks.update(logp)
        with _timed(seconds, "describe"):
            figures = describe(groups)
        with _timed(seconds, "journal"):
            self.journal.record({**figures, **logp.metrics, **updated})
            self.journal.finish_step(step)
        cpu_seconds = time.process_time() - cpu_started - cpu
        (self.run_dir / "rollouts" / f"step_{step}.jsonl").unlink()
        return DriverSeconds(seconds, cpu_seconds)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started


def large_config(run_dir: Path) -> Config:
    """Return a configuration with the sections that the driver reads."""
    config = Config()
    config.run.dir = str(run_dir)
    config.rollout.samples_per_prompt = SAMPLES
    config.rollout.max_response_tokens = LONGEST
    config.algorithm.dynamic_sampling.enable = True
    config.trainer.prompts_per_step = PROMPTS
    config.trainer.prompts_per_update = PROMPTS_PER_UPDATE
    return config
