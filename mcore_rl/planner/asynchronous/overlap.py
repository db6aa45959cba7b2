"""Time and idleness of trainer and engines in an asynchronous step, and the mean staleness of trained groups.

    step = max(g, T) + P    g: engines, T: trainer (see times.py), P: weight update, during which both stop

Staleness in versions, by Little's law, at the moment of a weight update (B groups are trained between two of them):
mean = (groups in flight + finished groups) / B.

    max_staleness                                     T >= g: finished groups accumulate up to the limit
    min(max_staleness, groups in flight / B + T / g)  T < g: T / g of a batch has finished since the last batch
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.rules.staleness import check_staleness
from mcore_rl.errors import ConfigError
from mcore_rl.planner.asynchronous.balance import GpuSplit, balanced, slower_seconds
from mcore_rl.planner.asynchronous.times import StepTimes
from mcore_rl.planner.sync import WeightSync
from model_converters.mapping.layout import TrainLayout


@dataclass(frozen=True)
class Balance:
    """The fastest division of the GPUs, with the keys to set. `overrides` is empty if it is the current one."""

    engine_gpus: int
    trainer_gpus: int
    step_seconds: float
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Overlap:
    """Times of one asynchronous step. None if an assumption in `plan.*` is not set; an unknown swap counts as 0."""

    generate_seconds: float | None
    train_seconds: float | None
    swap_seconds: float | None
    engine_gpus: int
    trainer_gpus: int
    mean_staleness: float | None
    max_staleness: int
    balance: Balance | None

    @property
    def step_seconds(self) -> float | None:
        slower = self._slower_seconds
        return None if slower is None else slower + (self.swap_seconds or 0.0)

    @property
    def trainer_idle_fraction(self) -> float | None:
        """Share of the step in which the trainer waits for responses."""
        return self._idle(self.train_seconds)

    @property
    def generator_idle_fraction(self) -> float | None:
        """Share of the step in which no further group may start."""
        return self._idle(self.generate_seconds)

    def _idle(self, busy: float | None) -> float | None:
        slower, step = self._slower_seconds, self.step_seconds
        return None if slower is None or step is None or busy is None else (slower - busy) / step

    @property
    def _slower_seconds(self) -> float | None:
        if self.generate_seconds is None or self.train_seconds is None:
            return None
        return max(self.generate_seconds, self.train_seconds)

    def to_json(self) -> dict[str, Any]:
        balance = self.balance
        return {
            "generate_seconds": self.generate_seconds,
            "train_seconds": self.train_seconds,
            "swap_seconds": self.swap_seconds,
            "step_seconds": self.step_seconds,
            "trainer_idle_fraction": self.trainer_idle_fraction,
            "generator_idle_fraction": self.generator_idle_fraction,
            "engine_gpus": self.engine_gpus,
            "trainer_gpus": self.trainer_gpus,
            "balanced_engine_gpus": None if balance is None else balance.engine_gpus,
            "balanced_trainer_gpus": None if balance is None else balance.trainer_gpus,
            "balanced_step_seconds": None if balance is None else balance.step_seconds,
            "balanced_overrides": None if balance is None else list(balance.overrides),
            "mean_staleness": self.mean_staleness,
            "max_staleness": self.max_staleness,
        }


def overlap_of(times: StepTimes, layout: TrainLayout, sync: WeightSync) -> Overlap | None:
    """Compute the overlap of generation and training; None for synchronous and supervised runs."""
    config = times.config
    rollout = config.rollout
    if rollout.max_staleness == 0 or is_supervised(config.algorithm):
        return None
    generate, train = times.generate_seconds(rollout.num_engines), times.train_seconds(layout.world_size)
    swap = sync.seconds if sync.bytes_crossing_hosts else 0.0
    staleness = balance = None
    if generate is not None and train is not None:
        staleness = _mean_staleness(times, generate, train)
        balance = _balance(times, balanced(times, layout), swap)
    return Overlap(
        generate,
        train,
        swap,
        engine_gpus=rollout.num_engines * rollout.tp,
        trainer_gpus=layout.world_size,
        mean_staleness=staleness,
        max_staleness=rollout.hard_staleness,
        balance=balance,
    )


def if_asynchronous(times: StepTimes, layout: TrainLayout, sync: WeightSync) -> Overlap | None:
    """Compute the overlap of a synchronous run if it had rollout.max_staleness=1.

    None if the run cannot be asynchronous, for example because trainer ranks and engines share GPUs.
    """
    config = times.config
    if config.rollout.max_staleness:
        return None
    asynchronous = replace(config, rollout=replace(config.rollout, max_staleness=1))
    try:
        check_staleness(asynchronous)
    except ConfigError:
        return None
    return overlap_of(replace(times, config=asynchronous), layout, sync)


def _mean_staleness(times: StepTimes, generate: float, train: float) -> float:
    rollout, batch = times.config.rollout, times.config.trainer.prompts_per_step
    if train >= generate:
        return float(rollout.max_staleness)
    in_flight = times.groups_in_flight(rollout.num_engines)
    return min(rollout.max_staleness, in_flight / batch + train / generate)


def _balance(times: StepTimes, split: GpuSplit, swap: float | None) -> Balance:
    return Balance(
        engine_gpus=split.num_engines * times.config.rollout.tp,
        trainer_gpus=split.num_ranks,
        step_seconds=slower_seconds(times, split) + (swap or 0.0),
        overrides=split.overrides(times.config),
    )
