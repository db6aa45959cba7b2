"""Division of a cluster's GPUs between trainer and engines that makes the slower of them as fast as possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from mcore_rl.config.schema import ClusterConfig, Config
from mcore_rl.planner.asynchronous.times import StepTimes
from model_converters.mapping.layout import TrainLayout


@dataclass(frozen=True)
class GpuSplit:
    """Numbers of trainer ranks and engines.

    `nodes` is rollout.nodes; with 0 the engines use the GPUs that the trainer ranks leave free.
    """

    num_ranks: int
    num_engines: int
    nodes: int = 0

    def overrides(self, config: Config) -> tuple[str, ...]:
        """Return the keys that change the split of `config` to this one."""
        cluster, rollout = config.cluster, config.rollout
        all_slots = (cluster.nodes - self.nodes) * cluster.gpus_per_node
        keys = [
            ("rollout.nodes", self.nodes, rollout.nodes),
            ("rollout.num_engines", self.num_engines, rollout.num_engines),
        ]
        if config.actor.num_ranks is not None or self.num_ranks != all_slots:
            keys.append(("actor.num_ranks", self.num_ranks, config.actor.num_ranks or 0))
        return tuple(f"{key}={value}" for key, value, present in keys if value != present)


def balanced(times: StepTimes, layout: TrainLayout) -> GpuSplit:
    """Return the split with the shortest step, or the current split if no other is faster.

    Memory is not checked.
    """
    current = GpuSplit(layout.world_size, times.config.rollout.num_engines, times.config.rollout.nodes)
    return min([current, *splits(times.config, layout)], key=lambda split: slower_seconds(times, split))


def slower_seconds(times: StepTimes, split: GpuSplit) -> float:
    """Return the time of the slower side. Both times must be known."""
    generate, train = times.generate_seconds(split.num_engines), times.train_seconds(split.num_ranks)
    assert generate is not None
    assert train is not None
    return max(generate, train)


def splits(config: Config, layout: TrainLayout) -> Iterator[GpuSplit]:
    """Yield all splits that the layout divides and that leave GPUs for an engine.

    If engines have nodes of their own, the splits are whole nodes.
    """
    cluster, batch = config.cluster, config.trainer.prompts_per_update * config.rollout.samples_per_prompt
    replica = layout.tp * layout.pp * layout.cp
    # The number of ranks must be a multiple of both the dense and the expert layout.
    unit = lcm(replica, layout.etp * layout.ep * layout.pp)
    for nodes in range(1, cluster.nodes) if config.rollout.nodes else [0]:
        offered = (cluster.nodes - nodes) * cluster.gpus_per_node
        fewest = max(offered // unit * unit, unit) if nodes else unit
        for num_ranks in range(fewest, min(offered, batch * replica) + 1, unit):
            num_engines = room_for_engines(cluster, config.rollout.tp, num_ranks, nodes)
            if num_engines:
                yield GpuSplit(num_ranks, num_engines, nodes)


def room_for_engines(cluster: ClusterConfig, tp: int, num_ranks: int, nodes: int) -> int:
    """Return the number of engines that fit in the last `nodes` nodes or, with 0, on the GPUs without a trainer rank.

    resolved.placement places engines in the same order.
    """
    slots = cluster.gpus_per_node
    node, used = (cluster.nodes - nodes, 0) if nodes else divmod(num_ranks, slots)
    free = cluster.nodes - node  # nodes; the first may also have trainer ranks
    if tp > slots:
        return (free - (used > 0)) * slots // tp
    return free * (slots // tp) - min(-(-used // tp), slots // tp)
