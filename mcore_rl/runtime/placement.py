"""Which node gets which rank and engine: a pure function of the configuration."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from mcore_rl.config import num_trainer_ranks
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError


@dataclass(frozen=True)
class Slot:
    """Where an engine or a critic's rank runs. `devices` are the GPUs of the node that it shares with trainer ranks;
    None when it has GPUs of its own, or none."""

    node: int
    devices: tuple[int, ...] | None


@dataclass(frozen=True)
class Placement:
    """`ranks[r]` is the node of trainer rank r; nodes count from 0, in the order of their names, the driver's first."""

    ranks: tuple[int, ...]
    engines: tuple[Slot, ...]
    critics: tuple[Slot, ...]
    bundle: dict[str, float]
    """What every node has to offer, in Ray's words: the same, since nobody knows which of them will be the first."""


def place(config: Config, *, on_gpus: bool, num_engines: int, num_critics: int = 0) -> Placement:
    """Consecutive ranks fill a node before the next one begins, so that tensor-parallel peers share one.

    Colocated engines spread evenly over the nodes, over the slots of trainer ranks; disaggregated ones take the slots
    after the last rank.

    The critic's ranks share the slots of the policy's, one each.

    Raises: ConfigError when an engine does not fit the slots of a node, or the critic those of the policy.
    """
    slots = config.cluster.gpus_per_node
    ranks = tuple(rank // slots for rank in range(num_trainer_ranks(config)))
    colocated = config.cluster.placement == "colocated"
    engine_of = _shared_slot if colocated else _own_slot
    engines = tuple(engine_of(config, engine, num_engines, on_gpus) for engine in range(num_engines))
    if num_critics > len(ranks):
        raise ConfigError(
            f"critic.num_ranks={num_critics} ranks share the slots of the {len(ranks)} trainer ranks; lower it"
        )
    critics = tuple(Slot(rank // slots, (rank % slots,) if on_gpus else None) for rank in range(num_critics))
    ranks_of, engines_of = Counter(ranks), Counter(slot.node for slot in engines)
    critics_of, tp = Counter(slot.node for slot in critics), config.rollout.tp
    cpus = max(ranks_of[n] + critics_of[n] + engines_of[n] * tp for n in range(config.cluster.nodes))
    gpus = max(ranks_of[node] + (0 if colocated else engines_of[node] * tp) for node in range(config.cluster.nodes))
    return Placement(ranks, engines, critics, {"CPU": float(cpus)} | ({"GPU": float(gpus)} if on_gpus else {}))


def _shared_slot(config: Config, engine: int, num_engines: int, on_gpus: bool) -> Slot:
    tp, slots, nodes = config.rollout.tp, config.cluster.gpus_per_node, config.cluster.nodes
    node = engine * nodes // num_engines
    if not on_gpus:
        return Slot(node, None)
    first_here = -(-node * num_engines // nodes)
    first = (engine - first_here) * tp
    if first + tp > slots:
        raise ConfigError(
            f"rollout.num_engines={num_engines} of rollout.tp={tp} do not fit on cluster.nodes={nodes} x "
            f"cluster.gpus_per_node={slots}, an engine within one node; lower rollout.num_engines or rollout.tp"
        )
    return Slot(node, tuple(range(first, first + tp)))


def _own_slot(config: Config, engine: int, num_engines: int, on_gpus: bool) -> Slot:
    tp, slots, nodes = config.rollout.tp, config.cluster.gpus_per_node, config.cluster.nodes
    if not on_gpus:
        return Slot(engine * nodes // num_engines, None)
    # The first slot after the ranks at which an engine can begin without crossing to another node.
    ranks, per_node = num_trainer_ranks(config), slots // tp
    node, used = divmod(ranks, slots)
    nth = engine + min(-(-used // tp), per_node)
    if per_node == 0 or node + nth // per_node >= nodes:
        raise ConfigError(
            f"cluster.placement=disaggregated: {ranks} trainer ranks leave no room for "
            f"rollout.num_engines={num_engines} of rollout.tp={tp}, an engine within one node, on "
            f"cluster.nodes={nodes} x cluster.gpus_per_node={slots}; lower actor.num_ranks or rollout.num_engines"
        )
    return Slot(node + nth // per_node, None)


def natural(name: str) -> list[tuple[int, str]]:
    """Key of a node's name by which n2 comes before n10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
