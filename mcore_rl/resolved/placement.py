"""Which node gets which rank and engine: a pure function of the configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.config import num_trainer_ranks
from mcore_rl.config.schema import ClusterConfig, Config, RolloutConfig
from mcore_rl.errors import ConfigError


@dataclass(frozen=True)
class Slot:
    """Where a process that is no trainer rank runs. `places` are those of the node's trainer ranks, counted from 0,
    whose GPUs it shares; None when it has GPUs of its own, or none."""

    node: int
    places: tuple[int, ...] | None


@dataclass(frozen=True)
class Guests:
    """Processes that share the slots of trainer ranks: with `tp` engines of so many slots each, spread over the nodes;
    without it ranks, one on each slot, in the order of the trainer's. `section` configures them."""

    section: str
    num: int
    tp: int | None = None

    @property
    def num_cpus(self) -> int:
        """Of each."""
        return self.tp or 1


@dataclass(frozen=True)
class RunPlacement:
    """`ranks[r]` is the node of trainer rank r; nodes count from 0, in the order of their names, the driver's first."""

    ranks: tuple[int, ...]
    engines: tuple[tuple[Slot, ...], ...]
    """Of each engine the slot on every node that it spans, with equal numbers of its ranks; the first leads it."""
    guests: dict[str, tuple[Slot, ...]]
    """By section."""
    bundle: dict[str, float]
    """What every node has to offer, in Ray's words: the same, since nobody knows which of them will be the first."""
    computing: dict[str, Counter[int]]
    """Ranks on each node, by section of the configuration: actor, rollout, and those of guests."""
    takes_turns: bool
    """Whether engines compute while trainer ranks wait, and the reverse."""

    def peers(self, section: str, node: int) -> int:
        """How many ranks on a node compute at the same time, one of the section among them."""
        of_section = self.computing[section][node]
        if self.takes_turns:
            return of_section
        return max(of_section, self.computing["actor"][node] + self.computing["rollout"][node])


def visible_devices(placement: RunPlacement, slot: Slot, of_ranks: Sequence[str]) -> str | None:
    """CUDA_VISIBLE_DEVICES of a process on `slot`; None: Ray sees to that. `of_ranks[r]` is that of trainer rank r: Ray
    hands a node's GPUs out in an order of its own, and of those that the node itself was given."""
    if slot.places is None:
        return None
    here = [device for node, device in zip(placement.ranks, of_ranks, strict=True) if node == slot.node]
    return ",".join(here[place] for place in slot.places)


def place(config: Config, *, on_gpus: bool, num_engines: int, guests: Sequence[Guests] = ()) -> RunPlacement:
    """Consecutive ranks fill a node before the next one begins, so that tensor-parallel peers share one.

    Colocated engines are guests of trainer ranks; disaggregated ones take the slots after the last rank.

    Raises: ConfigError when an engine does not fit the slots of a node, or guests those of the policy.
    """
    cluster, rollout = config.cluster, config.rollout
    slots, tp = cluster.gpus_per_node, rollout.tp
    ranks = tuple(rank // slots for rank in range(num_trainer_ranks(config)))
    colocated = cluster.placement == "colocated"
    engines: tuple[tuple[Slot, ...], ...]
    if cluster.nodes > 1 and tp > slots:
        engines = _wide_engines(cluster, rollout, num_engines, len(ranks), on_gpus)
    elif colocated:
        engines = tuple(
            (slot,) for slot in _shared_slots(cluster, Guests("rollout", num_engines, tp), len(ranks), on_gpus)
        )
    else:
        engines = tuple((_own_slot(cluster, rollout, engine, len(ranks), on_gpus),) for engine in range(num_engines))
    placed = {each.section: _shared_slots(cluster, each, len(ranks), on_gpus) for each in guests}
    computing = {"actor": Counter(ranks), "rollout": Counter[int]()}
    for hosts in engines:
        computing["rollout"] += Counter({slot.node: tp // len(hosts) for slot in hosts})
    for each in guests:
        computing[each.section] = Counter({})
        for slot in placed[each.section]:
            computing[each.section][slot.node] += each.num_cpus
    cpus_of = sum(computing.values(), Counter[int]())
    gpus_of = computing["actor"] if colocated else computing["actor"] + computing["rollout"]
    bundle = {"CPU": float(max(cpus_of.values()))} | ({"GPU": float(max(gpus_of.values()))} if on_gpus else {})
    return RunPlacement(ranks, engines, placed, bundle, computing, colocated)


def _wide_engines(
    cluster: ClusterConfig, rollout: RolloutConfig, num_engines: int, num_ranks: int, on_gpus: bool
) -> tuple[tuple[Slot, ...], ...]:
    """Engines of more ranks than a node has slots: each fills whole nodes, one engine after the other."""
    slots, nodes, tp = cluster.gpus_per_node, cluster.nodes, rollout.tp
    if tp % slots:
        raise ConfigError(
            f"rollout.tp={tp}: an engine that spans nodes fills them; set a multiple of cluster.gpus_per_node={slots}, "
            "or at most as many"
        )
    colocated = cluster.placement == "colocated"
    first, end = (0, num_ranks // slots if on_gpus else nodes)
    if not colocated:
        first, end = _first_free_node(cluster, rollout, num_ranks), nodes
    span = tp // slots
    if first + num_engines * span > end:
        raise ConfigError(
            f"rollout.num_engines={num_engines} of rollout.tp={tp} span {num_engines * span} nodes of "
            f"cluster.gpus_per_node={slots}, and {max(end - first, 0)} of cluster.nodes={nodes} are there for engines; "
            "lower rollout.num_engines or rollout.tp"
        )
    places = tuple(range(slots)) if on_gpus and colocated else None
    return tuple(
        tuple(Slot(first + engine * span + node, places) for node in range(span)) for engine in range(num_engines)
    )


def _first_free_node(cluster: ClusterConfig, rollout: RolloutConfig, num_ranks: int) -> int:
    """Of those that are the engines' alone."""
    if rollout.nodes:
        return cluster.nodes - rollout.nodes
    return -(-num_ranks // cluster.gpus_per_node)


def _shared_slots(cluster: ClusterConfig, guests: Guests, num_ranks: int, on_gpus: bool) -> tuple[Slot, ...]:
    slots = cluster.gpus_per_node
    if guests.tp is not None:
        return tuple(_engine_slot(cluster, guests, engine, num_ranks, on_gpus) for engine in range(guests.num))
    if guests.num > num_ranks:
        raise ConfigError(
            f"{guests.section}.num_ranks={guests.num} ranks share the slots of the {num_ranks} trainer ranks; lower it"
        )
    return tuple(Slot(rank // slots, (rank % slots,) if on_gpus else None) for rank in range(guests.num))


def _engine_slot(cluster: ClusterConfig, guests: Guests, engine: int, num_ranks: int, on_gpus: bool) -> Slot:
    slots, nodes, num, tp = cluster.gpus_per_node, cluster.nodes, guests.num, guests.tp or 1
    node = engine * nodes // num
    if not on_gpus:
        return Slot(node, None)
    first_here = -(-node * num // nodes)
    first = (engine - first_here) * tp
    if first + tp > min(slots, num_ranks - node * slots):
        section = guests.section
        raise ConfigError(
            f"{section}.num_engines={num} of {section}.tp={tp} do not fit on the GPUs of {num_ranks} trainer ranks on "
            f"cluster.nodes={nodes} x cluster.gpus_per_node={slots}, an engine within one node; lower "
            f"{section}.num_engines or {section}.tp"
        )
    return Slot(node, tuple(range(first, first + tp)))


def _own_slot(cluster: ClusterConfig, rollout: RolloutConfig, engine: int, ranks: int, on_gpus: bool) -> Slot:
    tp, slots, nodes = rollout.tp, cluster.gpus_per_node, cluster.nodes
    if not on_gpus and nodes == 1:
        return Slot(0, None)
    # The first slot after the ranks at which an engine can begin without crossing to another node.
    per_node = slots // tp
    node, used = (nodes - rollout.nodes, 0) if rollout.nodes else divmod(ranks, slots)
    nth = engine + min(-(-used // tp), per_node)
    if per_node == 0 or node + nth // per_node >= nodes:
        raise ConfigError(
            f"cluster.placement=disaggregated: {ranks} trainer ranks leave no room for "
            f"rollout.num_engines={rollout.num_engines} of rollout.tp={tp}, an engine within one node, on "
            f"cluster.nodes={nodes} x cluster.gpus_per_node={slots}; lower actor.num_ranks or rollout.num_engines, or "
            "raise rollout.nodes"
        )
    return Slot(node + nth // per_node, None)
