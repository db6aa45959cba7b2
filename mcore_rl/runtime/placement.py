"""Which node gets which rank and engine: a pure function of the configuration."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from mcore_rl.config import num_trainer_ranks
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError


@dataclass(frozen=True)
class EngineSlot:
    """Where an engine runs. `devices` are the GPUs of the node that it shares with trainer ranks; None when it has GPUs
    of its own, or none."""

    node: int
    devices: tuple[int, ...] | None


@dataclass(frozen=True)
class Placement:
    """`ranks[r]` is the node of trainer rank r; nodes count from 0, in the order of their names, the driver's first."""

    ranks: tuple[int, ...]
    engines: tuple[EngineSlot, ...]
    bundle: dict[str, float]
    """What every node has to offer, in Ray's words: the same, since nobody knows which of them will be the first."""


def place(config: Config, *, on_gpus: bool, num_engines: int) -> Placement:
    """Consecutive ranks fill a node before the next one begins, so that tensor-parallel peers share one.

    Colocated engines spread evenly over the nodes, over the slots of trainer ranks; disaggregated ones take the slots
    after the last rank.

    Raises: ConfigError when an engine does not fit the slots of a node.
    """
    slots = config.cluster.gpus_per_node
    ranks = tuple(rank // slots for rank in range(num_trainer_ranks(config)))
    colocated = config.cluster.placement == "colocated"
    engine_of = _shared_slot if colocated else _own_slot
    engines = tuple(engine_of(config, engine, num_engines, on_gpus) for engine in range(num_engines))
    ranks_of, engines_of = Counter(ranks), Counter(slot.node for slot in engines)
    tp = config.rollout.tp
    cpus = max(ranks_of[node] + engines_of[node] * tp for node in range(config.cluster.nodes))
    gpus = max(ranks_of[node] + (0 if colocated else engines_of[node] * tp) for node in range(config.cluster.nodes))
    return Placement(ranks, engines, {"CPU": float(cpus)} | ({"GPU": float(gpus)} if on_gpus else {}))


def _shared_slot(config: Config, engine: int, num_engines: int, on_gpus: bool) -> EngineSlot:
    tp, slots, nodes = config.rollout.tp, config.cluster.gpus_per_node, config.cluster.nodes
    node = engine * nodes // num_engines
    if not on_gpus:
        return EngineSlot(node, None)
    first_here = -(-node * num_engines // nodes)
    first = (engine - first_here) * tp
    if first + tp > slots:
        raise ConfigError(
            f"rollout.num_engines={num_engines} of rollout.tp={tp} do not fit on cluster.nodes={nodes} x "
            f"cluster.gpus_per_node={slots}, an engine within one node; lower rollout.num_engines or rollout.tp"
        )
    return EngineSlot(node, tuple(range(first, first + tp)))


def _own_slot(config: Config, engine: int, num_engines: int, on_gpus: bool) -> EngineSlot:
    tp, slots, nodes = config.rollout.tp, config.cluster.gpus_per_node, config.cluster.nodes
    if not on_gpus:
        return EngineSlot(engine * nodes // num_engines, None)
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
    return EngineSlot(node + nth // per_node, None)


def natural(name: str) -> list[tuple[int, str]]:
    """Key of a node's name by which n2 comes before n10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
