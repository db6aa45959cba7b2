"""Simulated asynchronous run: the real collector and scheduler with engines of benchmarks.asynchronous.clock."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.asynchronous.clock import SLOTS, SimulatedClock, SimulatedEngine, step_seconds
from benchmarks.driver.ray_ranks import Up
from mcore_rl.algorithms.filters import groups_with_variance
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.rollout.collector import GroupSource
from mcore_rl.rollout.results import GradingFailures
from mcore_rl.rollout.streaming.collector import StreamingCollector
from mcore_rl.runtime.calls import ProcessHandle
from mcore_rl.runtime.engines.fleet import Fleet, FleetEngine
from mcore_rl.runtime.engines.process import EngineProcess
from mcore_rl.runtime.engines.scheduler import Scheduler
from mcore_rl.runtime.health import Watch
from mcore_rl.types import Groups, Mean

SAMPLES = 16
"""Responses per prompt."""
MEAN_LOG, SPREAD_LOG, LONGEST, TIMES = np.log(46), 0.8, 256, 16
"""Lognormal lengths: median 46 and mean 63 tokens, multiplied by TIMES."""
PROMPTS = 100_000
ENDLESS = 1_000_000_000
"""Total steps passed to the collector: so many that groups are submitted until the simulation ends."""


@dataclass(frozen=True)
class Setting:
    """Shape of a run. steps: number of simulated steps."""

    engines: int
    max_staleness: int
    max_staleness_hard: int
    steps: int

    @property
    def prompts_per_step(self) -> int:
        """Groups per step; two steps fill all slots."""
        return self.engines * SLOTS // SAMPLES // 2

    @property
    def responses_per_step(self) -> int:
        return self.prompts_per_step * SAMPLES


@dataclass
class SimulationResult:
    """Measurements per step.

    driver_seconds: CPU seconds of the driver. ended: simulated time at the end of the step. waited: simulated seconds
    that the trainer waited for groups.
    """

    setting: Setting
    clock: SimulatedClock
    driver_seconds: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)
    """Number of trained groups by staleness in versions."""

    @property
    def responses(self) -> int:
        return len(self.ended) * self.setting.responses_per_step

    def per_1000(self, total: float) -> float:
        return 1000 * total / self.responses

    @property
    def cpu_per_1000(self) -> float:
        """CPU seconds of the driver per 1,000 responses."""
        return self.per_1000(sum(self.driver_seconds))

    @property
    def pace(self) -> float:
        """Responses per simulated second, excluding the first fifth of the steps (warm-up)."""
        first = len(self.ended) // 5
        steps = len(self.ended) - 1 - first
        return steps * self.setting.responses_per_step / (self.ended[-1] - self.ended[first])

    def cpu_in_tenth(self, number: int) -> float:
        """Return the median CPU seconds of the driver per 1,000 responses, over the n-th tenth of the steps."""
        tenth = len(self.driver_seconds) // 10
        steps = self.driver_seconds[(number - 1) * tenth : number * tenth]
        return 1000 * float(np.median(steps)) / self.setting.responses_per_step

    @property
    def trainer_waits(self) -> float:
        """Fraction of simulated time that the trainer waits, excluding the first fifth of the steps (warm-up)."""
        first = len(self.ended) // 5
        return sum(self.waited[first + 1 :]) / (self.ended[-1] - self.ended[first])

    @property
    def mean_age(self) -> float:
        return sum(age * groups for age, groups in self.ages.items()) / self.ages.total()


def simulate(setting: Setting) -> SimulationResult:
    with tempfile.TemporaryDirectory(prefix="mcore_rl_async_") as directory:
        simulated = _SimulatedRun(setting, Path(directory))
        for step in range(1, setting.steps + 1):
            simulated.step(step)
        return simulated.measured


class _SimulatedRun:
    """Runs steps like trainer.loop; everything except rollouts only takes simulated time."""

    def __init__(self, setting: Setting, directory: Path) -> None:
        rng = np.random.default_rng(0)
        drawn = np.clip(rng.lognormal(MEAN_LOG, SPREAD_LOG, (8192, SAMPLES)), 1, LONGEST)
        self.clock = SimulatedClock((TIMES * drawn).astype(np.int32))
        self.measured = SimulationResult(setting, self.clock)
        self._directory = directory
        # Training a batch takes as long as generating it on full engines, so that neither side limits the other.
        self._seconds_per_token = step_seconds(SLOTS) / (SLOTS * setting.engines)
        engines: list[FleetEngine] = []
        for number in range(setting.engines):
            handle = ProcessHandle[EngineProcess](f"engine {number}", SimulatedEngine(self.clock, directory))
            engines.append(Up(number, handle, cast(Watch, self.clock)))
        scheduler = Scheduler(Fleet(engines, cast(Watch, self.clock)), SLOTS, streaming=True)
        self._collector = _collector(scheduler, setting, directory)
        # Version 0 has been published before the first step, as in a run.
        with self.clock.meter.driver():
            self._collector.published(0)

    def step(self, step: int) -> None:
        clock, meter, measured = self.clock, self.clock.meter, self.measured
        before, began = meter.driver_seconds, clock.now
        with meter.driver():
            groups = self._collector.collect(step)
        measured.waited.append(clock.now - began)
        self._note(groups)
        tokens = sum(int(scalars.response_tokens.sum()) for scalars in groups.scalars)
        # As in a run, the driver waits for the update while the engines go on.
        training = clock.after(tokens * self._seconds_per_token)
        with meter.driver():
            clock.get([training])
        clock.version += 1
        with meter.driver():
            self._collector.published(clock.version)
            del groups
        measured.driver_seconds.append(meter.driver_seconds - before)
        measured.ended.append(clock.now)
        # The records of all steps would fill the disk.
        (self._directory / f"step_{step}.jsonl").unlink()

    def _note(self, groups: Groups) -> None:
        for age in range(self.measured.setting.max_staleness_hard + 2):
            share = groups.metrics.get(f"staleness/groups_{age}")
            if isinstance(share, Mean) and share.total:
                self.measured.ages[age] += int(share.total)
        # staleness/max is a separate metric: its value must be an age counted above.
        oldest = int(groups.metrics["staleness/max"].value)
        assert oldest in self.measured.ages


def _collector(scheduler: Scheduler, setting: Setting, directory: Path) -> StreamingCollector:
    source = GroupSource(
        sampler=PromptSampler(PROMPTS, 1),
        rollout=RolloutConfig(
            samples_per_prompt=SAMPLES,
            max_staleness=setting.max_staleness,
            max_staleness_hard=setting.max_staleness_hard,
        ),
        algorithm=AlgorithmConfig(),
        has_signal=groups_with_variance,
        prompts_per_step=setting.prompts_per_step,
        seed=1,
        records_dir=directory,
        failures=GradingFailures(RewardConfig(), print),
    )
    return StreamingCollector(scheduler, source, ENDLESS)
