"""How to share a cluster's GPUs out so that neither side of an asynchronous run waits long for the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from mcore_rl.config.schema import Config
from mcore_rl.planner.asynchronous.sides import Sides
from model_converters.mapping.layout import TrainLayout


@dataclass(frozen=True)
class Split:
    """`nodes`: rollout.nodes; 0: engines take the slots that the trainer ranks leave."""

    num_ranks: int
    num_engines: int
    nodes: int = 0

    def overrides(self, config: Config) -> tuple[str, ...]:
        """Keys to set, with which a run of `config` is shared out so."""
        cluster, rollout = config.cluster, config.rollout
        all_slots = (cluster.nodes - self.nodes) * cluster.gpus_per_node
        keys = [
            ("rollout.nodes", self.nodes, rollout.nodes),
            ("rollout.num_engines", self.num_engines, rollout.num_engines),
        ]
        if config.actor.num_ranks is not None or self.num_ranks != all_slots:
            keys.append(("actor.num_ranks", self.num_ranks, config.actor.num_ranks or 0))
        return tuple(f"{key}={value}" for key, value, present in keys if value != present)


def balanced(sides: Sides, layout: TrainLayout) -> Split:
    """The split of the cluster's GPUs whose slower side is fastest; the present one, if none is better.

    Whether the ranks have enough memory is not looked at.
    """
    present = Split(layout.world_size, sides.config.rollout.num_engines, sides.config.rollout.nodes)
    return min([present, *splits(sides.config, layout)], key=lambda split: slower_seconds(sides, split))


def slower_seconds(sides: Sides, split: Split) -> float:
    """Of the side that takes longer. To be asked where both times are known."""
    generate, train = sides.generate_seconds(split.num_engines), sides.train_seconds(split.num_ranks)
    assert generate is not None
    assert train is not None
    return max(generate, train)


def splits(config: Config, layout: TrainLayout) -> Iterator[Split]:
    """Everything that the layout's sizes divide and that leaves room for an engine; whole nodes, if engines have nodes
    of their own."""
    cluster, batch = config.cluster, config.trainer.prompts_per_update * config.rollout.samples_per_prompt
    replica = layout.tp * layout.pp * layout.cp
    unit = lcm(replica, layout.etp * layout.ep * layout.pp)
    for nodes in range(1, cluster.nodes) if config.rollout.nodes else [0]:
        offered = (cluster.nodes - nodes) * cluster.gpus_per_node
        fewest = max(offered // unit * unit, unit) if nodes else unit
        for num_ranks in range(fewest, min(offered, batch * replica) + 1, unit):
            num_engines = room_for_engines(config, num_ranks, nodes)
            if num_engines:
                yield Split(num_ranks, num_engines, nodes)


def room_for_engines(config: Config, num_ranks: int, nodes: int) -> int:
    """Number of engines that fit in the last `nodes` nodes; with 0, in the slots that the ranks leave free.

    resolved.placement places them in the same order.
    """
    slots, tp = config.cluster.gpus_per_node, config.rollout.tp
    node, used = (config.cluster.nodes - nodes, 0) if nodes else divmod(num_ranks, slots)
    free = config.cluster.nodes - node  # nodes, the first of which may hold ranks as well
    if tp > slots:
        return (free - (used > 0)) * slots // tp
    return free * (slots // tp) - min(-(-used // tp), slots // tp)
