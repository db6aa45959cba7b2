"""How a step of an asynchronous run divides its time, who waits, and how old the groups are that it trains.

    step = max(g, T) + P    g: engines, T: trainer (see sides.py), P: the swap of the weights, in which both stop

Staleness of groups, by Little's law: mean = (groups under way + finished ones) / B when new weights come, between two
of which B groups are trained.

    max_staleness                                       T >= g: finished groups pile up
    min(max_staleness, groups under way / B + T / g)    T < g: in T so many have finished since the last batch
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.rules.staleness import check_staleness
from mcore_rl.errors import ConfigError
from mcore_rl.planner.asynchronous.balance import Split, balanced, slower_seconds
from mcore_rl.planner.asynchronous.sides import Sides
from mcore_rl.planner.sync import WeightSync
from model_converters.mapping.layout import TrainLayout


@dataclass(frozen=True)
class Balance:
    """How the GPUs would be shared out best. `overrides`: what to set for it; none where it is so already."""

    engine_gpus: int
    trainer_gpus: int
    step_seconds: float
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Overlap:
    """Of one step. None where an assumption of `plan.*` is not set; a swap that is not known counts as 0."""

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
        """Of a step's time, in which it waits for responses."""
        return self._idle(self.train_seconds)

    @property
    def generator_idle_fraction(self) -> float | None:
        """Of a step's time, in which no further group may begin."""
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


def overlap_of(sides: Sides, layout: TrainLayout, sync: WeightSync) -> Overlap | None:
    """None for synchronous runs, and for those that generate nothing."""
    config = sides.config
    rollout = config.rollout
    if rollout.max_staleness == 0 or is_supervised(config.algorithm):
        return None
    generate, train = sides.generate_seconds(rollout.num_engines), sides.train_seconds(layout.world_size)
    swap = sync.seconds if sync.bytes_crossing_hosts else 0.0
    staleness = balance = None
    if generate is not None and train is not None:
        staleness = _mean_staleness(sides, generate, train)
        balance = _balance(sides, balanced(sides, layout), swap)
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


def if_asynchronous(sides: Sides, layout: TrainLayout, sync: WeightSync) -> Overlap | None:
    """What a synchronous run would be with rollout.max_staleness=1; None where it cannot be so, as on GPUs that trainer
    ranks and engines share."""
    config = sides.config
    if config.rollout.max_staleness:
        return None
    ahead = replace(config, rollout=replace(config.rollout, max_staleness=1))
    try:
        check_staleness(ahead)
    except ConfigError:
        return None
    return overlap_of(replace(sides, config=ahead), layout, sync)


def _mean_staleness(sides: Sides, generate: float, train: float) -> float:
    rollout, batch = sides.config.rollout, sides.config.trainer.prompts_per_step
    if train >= generate:
        return float(rollout.max_staleness)
    under_way = sides.groups_under_way(rollout.num_engines)
    return min(rollout.max_staleness, under_way / batch + train / generate)


def _balance(sides: Sides, split: Split, swap: float | None) -> Balance:
    return Balance(
        engine_gpus=split.num_engines * sides.config.rollout.tp,
        trainer_gpus=split.num_ranks,
        step_seconds=slower_seconds(sides, split) + (swap or 0.0),
        overrides=split.overrides(sides.config),
    )
