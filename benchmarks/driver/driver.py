"""Driver work in a step of 8,192 prompts x 16 samples with 64 engines and 64 data-parallel ranks.

There is no model: engines and ranks return at once, and everything else runs as in a real run. Rows `in process`
measure the driver's own work. Rows `through Ray` add the real calls to engines and to 64 or 512 trainer ranks, eight
per node. The ranks are handles of four processes, so that this machine does not have to start hundreds. The wall-clock
time includes the time in which these four unpack their arguments; on a cluster, other hosts would do this in parallel.
A separate row, with one process per rank, measures how long a node takes to forward a call to its ranks. Episodes have
2 sequences on average, each trained like a response, and metrics of turns and tools.

Rows `beside in process` compare with the same work in one process, and show where the difference is. In one process
there is no scheduler, and the time of the simulated engines is subtracted. Through Ray, the driver waits for them: four
processes do the work of all engines and ranks, on the cores that the driver uses too.
"""

from __future__ import annotations

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
RATIO_AIMS = {1: "<= 1.2", 8: "<= 1.5"}
"""Aims of the time through Ray, relative to one process, by number of peers."""
RANK_CALLS = ("logp", "update")
"""Phases that call trainer ranks."""
LIMIT_SECONDS = 1.0
"""Limit for the driver's time per step; the aim for episodes is twice as long."""


def run() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="mcore_rl_driver_") as directory:
        run_dir = Path(directory)
        local = _measure(run_dir / "local", ReadyPool(run_dir / "local"), SilentRanks())
        results = [local.result("in process", "<= 1.0")]
        for peers in PEERS:
            name = f"through Ray, {DP_RANKS * peers} trainer ranks"
            with ray_groups(peers) as (pool, ranks):
                through_ray = _measure(run_dir / f"ray{peers}", pool, ranks)
            results += [
                through_ray.result(name, "<= 1.0"),
                *_beside(name, through_ray, local, RATIO_AIMS.get(peers, "")),
            ]
        ready = ReadyPool(run_dir / "episodes", make_episodes)
        results.append(_measure(run_dir / "episodes", ready, SilentRanks()).result("episodes, in process", "<= 2.0"))
        with ray_groups(1, make_episodes) as (pool, ranks):
            name = f"episodes, through Ray, {DP_RANKS} trainer ranks"
            results.append(_measure(run_dir / "ray_episodes", pool, ranks).result(name, "<= 2.0"))
    seconds = seconds_to_pass_on(50)
    name = f"a call passed on to the {RANKS_PER_NODE} ranks of a node"
    note = "adds to the wall clock of the rows through Ray once per call, for any number of nodes"
    return [*results, compare(name, seconds * 1000, LIMIT_SECONDS * 1000, "ms", note=note)]


def _measure(run_dir: Path, pool: ReadyPool | Scheduler, ranks: SilentRanks | TrainerGroup) -> DriverSeconds:
    """Measure steps; returns the one with the median wall-clock time, without the simulated engines of this process."""
    driver = Driver(run_dir, pool, ranks)
    steps = [driver.step(step) for step in range(1, STEPS + 2)][1:]  # the first step includes imports and compilation
    driver.journal.close()
    # One real step, so that its phases add up to its time; medians of the phases would not.
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def _beside(name: str, through_ray: DriverSeconds, local: DriverSeconds, aim: str) -> Iterator[Result]:
    """Compare a step through Ray with the same work in one process: as a whole, and in parts."""
    yield compare(f"{name}, beside in process", through_ray.seconds, local.seconds, "s/step", aim)
    others = [phase for phase in local.phases if phase not in ("collect", *RANK_CALLS)]
    for part, phases in (("collect", ["collect"]), ("calls of ranks", RANK_CALLS), ("other phases", others)):
        ours, theirs = (1000 * sum(step.phases[phase] for phase in phases) for step in (through_ray, local))
        yield compare(f"  {name}: {part}", ours, theirs, "ms/step")
    ours, theirs = (1000 * step.main_cpu_seconds for step in (through_ray, local))
    note = "the rest of its wall clock is the disk and, through Ray, waits for the simulated engines and ranks"
    yield compare(f"  {name}: CPU time of the driver's main thread", ours, theirs, "ms/step", note=note)


@dataclass(frozen=True)
class DriverSeconds:
    """Units: seconds; phases of the wall clock, and the CPU time of this process and of its main thread."""

    phases: dict[str, float]
    cpu_seconds: float
    main_cpu_seconds: float

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    def result(self, name: str, aim: str) -> Result:
        phases = shares(list(self.phases.items()))
        note = f"the driver's wall clock: {phases}; its CPU time {self.cpu_seconds:.2f} s"
        return compare(name, self.seconds, LIMIT_SECONDS, "s/step", aim, note)


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
                algorithm=config.algorithm,
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
        cpu_started, main_started = time.process_time(), time.thread_time()
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
        # The simulated engines of this process run in its main thread.
        main_cpu_seconds = time.thread_time() - main_started - cpu
        (self.run_dir / "rollouts" / f"step_{step}.jsonl").unlink()
        return DriverSeconds(seconds, cpu_seconds, main_cpu_seconds)


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
