"""Placement of ranks and engines on nodes: a pure function of the configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.config.models import TeacherConfig
from mcore_rl.config.schema import ClusterConfig, RolloutConfig
from mcore_rl.errors import ConfigError


@dataclass(frozen=True)
class Slot:
    """Place of a process that is not a trainer rank. `places`: indices of the trainer ranks on the node whose GPUs it
    shares, from 0; None if it has its own GPUs or none."""

    node: int
    places: tuple[int, ...] | None


@dataclass(frozen=True)
class Guests:
    """Processes that share the slots of trainer ranks. With `tp`: engines with `tp` slots each, spread over the nodes;
    without: ranks, one per slot, in the order of the trainer ranks. `section` is their configuration section. `models`:
    number of models, each with `num` / `models` engines or ranks. Ranks of all models begin at the first slot."""

    section: str
    num: int
    tp: int | None = None
    models: int = 1

    @property
    def num_cpus(self) -> int:
        """CPUs reserved per process."""
        return self.tp or 1


def teacher_ranks(teacher: TeacherConfig) -> Guests:
    """Return the ranks of all teachers on ranks of their own."""
    return Guests("teacher", len(teacher.entries) * teacher.num_ranks, models=len(teacher.entries))


@dataclass(frozen=True)
class RunPlacement:
    """Nodes of all processes. Nodes count from 0 in the order of their names, the driver's node first.

    `ranks[r]` is the node of trainer rank r. `engines` has the slots of each engine: one per node that it spans, with
    equal numbers of ranks; the first one leads the engine. `guests` has slots by configuration section. `bundle` are
    the Ray resources required of every node; they are equal, since the order of the nodes is not known in advance.
    `computing` is the number of ranks on each node by configuration section: actor, rollout, and the guests' sections.
    `takes_turns` is true if engines and trainer ranks never compute at the same time.
    """

    ranks: tuple[int, ...]
    engines: tuple[tuple[Slot, ...], ...]
    guests: dict[str, tuple[Slot, ...]]
    bundle: dict[str, float]
    computing: dict[str, Counter[int]]
    takes_turns: bool

    def peers(self, section: str, node: int) -> int:
        """Return the number of ranks on a node that compute at the same time as a rank of the section, including it."""
        of_section = self.computing[section][node]
        if self.takes_turns:
            return of_section
        return max(of_section, self.computing["actor"][node] + self.computing["rollout"][node])


def visible_devices(placement: RunPlacement, slot: Slot, of_ranks: Sequence[str]) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of a process on `slot`; None: set by Ray. `of_ranks[r]` is the value of trainer rank
    r; it is needed because Ray assigns GPUs in its own order."""
    if slot.places is None:
        return None
    here = [device for node, device in zip(placement.ranks, of_ranks, strict=True) if node == slot.node]
    return ",".join(here[place] for place in slot.places)


def place(
    cluster: ClusterConfig,
    rollout: RolloutConfig,
    num_ranks: int,
    *,
    on_gpus: bool,
    num_engines: int,
    guests: Sequence[Guests] = (),
) -> RunPlacement:
    """Compute the placement of `num_ranks` trainer ranks, the engines, and `guests`.

    Consecutive ranks fill a node before the next node, so that tensor-parallel peers share a node. Colocated engines
    share the slots of trainer ranks; disaggregated ones use the slots after the last rank. Without trainer ranks,
    guests have no GPUs.

    Raises: ConfigError if an engine does not fit the slots of a node.
    """
    slots, tp = cluster.gpus_per_node, rollout.tp
    ranks = tuple(rank // slots for rank in range(num_ranks))
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
    shares_gpus = on_gpus and num_ranks > 0
    placed = {each.section: _shared_slots(cluster, each, len(ranks), shares_gpus) for each in guests}
    computing = {"actor": Counter(ranks), "rollout": Counter[int]()}
    for hosts in engines:
        computing["rollout"].update({slot.node: tp // len(hosts) for slot in hosts})
    for each in guests:
        nodes_of_guests = Counter(slot.node for slot in placed[each.section])
        computing[each.section] = Counter({node: num * each.num_cpus for node, num in nodes_of_guests.items()})
    # All bundles must be equal, because the order of the nodes is unknown before Ray has placed them.
    cpus_of = sum(computing.values(), Counter[int]())
    # Guests and colocated engines use the GPUs of the trainer ranks.
    gpus_of = computing["actor"] if colocated else computing["actor"] + computing["rollout"]
    bundle = {"CPU": float(max(cpus_of.values()))} | ({"GPU": float(max(gpus_of.values()))} if on_gpus else {})
    return RunPlacement(ranks, engines, placed, bundle, computing, colocated)


def _wide_engines(
    cluster: ClusterConfig, rollout: RolloutConfig, num_engines: int, num_ranks: int, on_gpus: bool
) -> tuple[tuple[Slot, ...], ...]:
    """Place engines with more ranks than a node has slots: each fills whole nodes."""
    slots, nodes, tp = cluster.gpus_per_node, cluster.nodes, rollout.tp
    if tp % slots:
        raise ConfigError(
            f"rollout.tp={tp}: an engine that spans nodes must fill them; set a multiple of "
            f"cluster.gpus_per_node={slots}, or at most {slots}"
        )
    colocated = cluster.placement == "colocated"
    # On GPUs, a colocated engine needs a trainer rank on each of its slots.
    first, end = (0, num_ranks // slots if on_gpus else nodes)
    if not colocated:
        first, end = (nodes - rollout.nodes if rollout.nodes else -(-num_ranks // slots)), nodes
    span = tp // slots
    if first + num_engines * span > end:
        raise ConfigError(
            f"rollout.num_engines={num_engines} of rollout.tp={tp} span {num_engines * span} nodes of "
            f"cluster.gpus_per_node={slots}, but {max(end - first, 0)} of cluster.nodes={nodes} are available for "
            "engines; lower rollout.num_engines or rollout.tp"
        )
    places = tuple(range(slots)) if on_gpus and colocated else None
    return tuple(
        tuple(Slot(first + engine * span + node, places) for node in range(span)) for engine in range(num_engines)
    )


def _shared_slots(cluster: ClusterConfig, guests: Guests, num_ranks: int, on_gpus: bool) -> tuple[Slot, ...]:
    slots = cluster.gpus_per_node
    if guests.tp is not None:
        return tuple(_engine_slot(cluster, guests, engine, num_ranks, on_gpus) for engine in range(guests.num))
    of_model = guests.num // guests.models
    # config/rules/validation.py rejects more ranks than trainer ranks.
    ranks = [Slot(rank // slots, (rank % slots,) if on_gpus else None) for rank in range(of_model)]
    return tuple(ranks * guests.models)


def _engine_slot(cluster: ClusterConfig, guests: Guests, engine: int, num_ranks: int, on_gpus: bool) -> Slot:
    slots, nodes, num, tp = cluster.gpus_per_node, cluster.nodes, guests.num, guests.tp or 1
    if on_gpus and num_ranks:
        # Other nodes have no GPUs of trainer ranks.
        nodes = -(-num_ranks // slots)
    node = engine * nodes // num
    if not on_gpus:
        return Slot(node, None)
    # Engine e is on node floor(e * nodes / num), so the first engine of a node is ceil(node * num / nodes).
    first_here = -(-node * num // nodes)
    first = (engine - first_here) * tp
    if first + tp > min(slots, num_ranks - node * slots):
        section, models = guests.section, guests.models
        product = f" for each of {models} models ({num} engines)" if models > 1 else ""
        raise ConfigError(
            f"{section}.num_engines={num // models}{product} of {section}.tp={tp} do not fit on the GPUs of "
            f"{num_ranks} trainer ranks on {nodes} nodes x cluster.gpus_per_node={slots}, an engine within one node; "
            f"lower {section}.num_engines or {section}.tp"
        )
    return Slot(node, tuple(range(first, first + tp)))


def _own_slot(cluster: ClusterConfig, rollout: RolloutConfig, engine: int, ranks: int, on_gpus: bool) -> Slot:
    tp, slots, nodes = rollout.tp, cluster.gpus_per_node, cluster.nodes
    # Processes on one CPU host need no slots of their own.
    if not on_gpus and nodes == 1:
        return Slot(0, None)
    # First slot after the ranks at which an engine fits without crossing a node boundary.
    per_node = slots // tp
    node, used = (nodes - rollout.nodes, 0) if rollout.nodes else divmod(ranks, slots)
    # Engine positions are counted from the start of `node`; those that trainer ranks overlap are skipped.
    nth = engine + min(-(-used // tp), per_node)
    if per_node == 0 or node + nth // per_node >= nodes:
        raise ConfigError(
            f"cluster.placement=disaggregated: {ranks} trainer ranks leave no room for "
            f"rollout.num_engines={rollout.num_engines} of rollout.tp={tp}, an engine within one node, on "
            f"cluster.nodes={nodes} x cluster.gpus_per_node={slots}; lower actor.num_ranks or rollout.num_engines, or "
            "raise rollout.nodes"
        )
    return Slot(node + nth // per_node, None)
