"""Time and idleness of trainer and engines in an asynchronous step, and the mean staleness of trained groups.

    step = max(g, T) + P    g: engines, T: trainer (see times.py), P: weight update, during which both stop

Staleness in versions, by Little's law, at the moment of a weight update (B groups are trained between two of them):
mean = (groups in flight + finished groups) / B.

    max_staleness                                     T >= g: finished groups accumulate up to the limit
    min(max_staleness, groups in flight / B + T / g)  T < g: T / g of a batch has finished since the last batch

The fastest division of the GPUs makes the slower of trainer and engines as fast as possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.rules.rollout import check_staleness
from mcore_rl.config.schema import ClusterConfig, RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.planner.sync import WeightSync
from mcore_rl.planner.times import StepTimes
from model_converters.mapping.layout import TrainLayout


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Times of one asynchronous step. None if an assumption in `plan.*` is not set; an unknown swap counts as 0.

    The idle fractions are the shares of the step in which the trainer waits for responses, and in which no further
    group may start. `balanced_*` describe the fastest division of the GPUs, with the keys to set (none if it is the
    current one). The fields are the keys of `asynchronous` in `plan --json`.
    """

    generate_seconds: float | None
    train_seconds: float | None
    swap_seconds: float | None
    step_seconds: float | None = None
    trainer_idle_fraction: float | None = None
    generator_idle_fraction: float | None = None
    engine_gpus: int
    trainer_gpus: int
    balanced_engine_gpus: int | None = None
    balanced_trainer_gpus: int | None = None
    balanced_step_seconds: float | None = None
    balanced_overrides: list[str] | None = None
    mean_staleness: float | None = None
    max_staleness: int


def overlap_of(times: StepTimes, layout: TrainLayout, sync: WeightSync) -> Overlap | None:
    """Compute the overlap of generation and training; None for synchronous and supervised runs."""
    config, rollout = times.config, times.config.rollout
    if rollout.max_staleness == 0 or is_supervised(config.algorithm):
        return None
    generate, train = times.generate_seconds(rollout.num_engines), times.train_seconds(layout.world_size)
    overlap = Overlap(
        generate_seconds=generate,
        train_seconds=train,
        swap_seconds=sync.steady.seconds if sync.steady.bytes_crossing_hosts else 0.0,
        engine_gpus=rollout.num_engines * rollout.tp,
        trainer_gpus=layout.world_size,
        max_staleness=rollout.hard_staleness,
    )
    if generate is None or train is None:
        return overlap
    swap, slower, split = overlap.swap_seconds or 0.0, max(generate, train), balanced(times, layout)
    return replace(
        overlap,
        step_seconds=slower + swap,
        trainer_idle_fraction=(slower - train) / (slower + swap),
        generator_idle_fraction=(slower - generate) / (slower + swap),
        balanced_engine_gpus=split.num_engines * rollout.tp,
        balanced_trainer_gpus=split.num_ranks,
        balanced_step_seconds=slower_seconds(times, split) + swap,
        balanced_overrides=split.overrides(config.cluster, rollout, config.actor.num_ranks),
        mean_staleness=_mean_staleness(times, generate, train),
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


@dataclass(frozen=True)
class GpuSplit:
    """Numbers of trainer ranks and engines.

    `nodes` is rollout.nodes; with 0 the engines use the GPUs that the trainer ranks leave free.
    """

    num_ranks: int
    num_engines: int
    nodes: int = 0

    def overrides(self, cluster: ClusterConfig, rollout: RolloutConfig, num_ranks: int | None) -> list[str]:
        """Return the keys that change the configured split to this one. `num_ranks` is actor.num_ranks."""
        keys = [
            ("rollout.nodes", self.nodes, rollout.nodes),
            ("rollout.num_engines", self.num_engines, rollout.num_engines),
        ]
        if num_ranks is not None or self.num_ranks != (cluster.nodes - self.nodes) * cluster.gpus_per_node:
            keys.append(("actor.num_ranks", self.num_ranks, num_ranks or 0))
        return [f"{key}={value}" for key, value, present in keys if value != present]


def balanced(times: StepTimes, layout: TrainLayout) -> GpuSplit:
    """Return the split with the shortest step, or the current split if no other is faster.

    Memory is not checked.
    """
    rollout = times.config.rollout
    current = GpuSplit(layout.world_size, rollout.num_engines, rollout.nodes)
    others = splits(times.config.cluster, rollout, times.batch.responses_per_update, layout)
    # min returns the first of equal splits, so an equally fast one does not replace the current split.
    return min([current, *others], key=lambda split: slower_seconds(times, split))


def slower_seconds(times: StepTimes, split: GpuSplit) -> float:
    """Return the seconds of the slower of engines and trainer. Both times must be known."""
    generate, train = times.generate_seconds(split.num_engines), times.train_seconds(split.num_ranks)
    assert generate is not None
    assert train is not None
    return max(generate, train)


def splits(
    cluster: ClusterConfig, rollout: RolloutConfig, responses_per_update: int, layout: TrainLayout
) -> Iterator[GpuSplit]:
    """Yield all splits whose number of trainer ranks fits the layout and that leave GPUs for an engine.

    If engines have nodes of their own (rollout.nodes), trainer ranks use the remaining nodes as far as the layout fits.
    """
    replica = layout.tp * layout.pp * layout.cp
    # The number of ranks must be a multiple of both the dense and the expert layout.
    unit = lcm(replica, layout.etp * layout.ep * layout.pp)
    for nodes in range(1, cluster.nodes) if rollout.nodes else [0]:
        offered = (cluster.nodes - nodes) * cluster.gpus_per_node
        fewest = max(offered // unit * unit, unit) if nodes else unit
        # Every data-parallel rank needs a response in each update.
        for num_ranks in range(fewest, min(offered, responses_per_update * replica) + 1, unit):
            num_engines = room_for_engines(cluster, rollout.tp, num_ranks, nodes)
            if num_engines:
                yield GpuSplit(num_ranks, num_engines, nodes)


def room_for_engines(cluster: ClusterConfig, tp: int, num_ranks: int, nodes: int) -> int:
    """Return the number of engines that fit in the last `nodes` nodes or, with 0, on the GPUs without a trainer rank.

    resolved.placement places engines in the same order.
    """
    slots = cluster.gpus_per_node
    node, used = (cluster.nodes - nodes, 0) if nodes else divmod(num_ranks, slots)
    free = cluster.nodes - node  # nodes; the first may also have trainer ranks
    # An engine that is larger than a node fills whole nodes. Others start at multiples of tp within a node.
    if tp > slots:
        return (free - (used > 0)) * slots // tp
    return free * (slots // tp) - min(-(-used // tp), slots // tp)
