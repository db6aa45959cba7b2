"""Processes of a run before they start: the name, node, devices and cores of each.

`runtime.launch` creates exactly these processes, and `mcore-rl train --dry-run` prints them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mcore_rl.config.episodes import WITH_GATEWAY
from mcore_rl.config.rules.rollout import episode_of
from mcore_rl.config.schema import Config
from mcore_rl.resolved.placement import Guests, RunPlacement, Slot, place


@dataclass(frozen=True)
class PlannedProcess:
    """One process.

    name: its name in messages and log files.
    section: its configuration section; actor for trainer ranks.
    node: number of its node, see RunPlacement.
    num_cpus: CPUs that it reserves. An engine has as many ranks on this node.
    num_gpus: GPUs that it reserves.
    shares_gpus_of: trainer ranks whose GPUs it uses; () if it reserves its own or needs none.
    peers: ranks on its node that compute at the same time, see RunPlacement.peers.
    """

    name: str
    section: str
    node: int
    num_cpus: int
    num_gpus: int
    shares_gpus_of: tuple[int, ...]
    peers: int


@dataclass(frozen=True)
class ProcessPlan:
    """All processes of a run besides the driver.

    engines: the processes of each rollout engine, one per node that it spans; the first one leads it.
    guests: by configuration section.
    gateways: one per node on which an engine is led, with rollout.episode=gateway.
    """

    placement: RunPlacement
    ranks: tuple[PlannedProcess, ...]
    engines: tuple[tuple[PlannedProcess, ...], ...]
    guests: dict[str, tuple[PlannedProcess, ...]]
    gateways: tuple[PlannedProcess, ...] = ()

    def __iter__(self) -> Iterator[PlannedProcess]:
        """Yield trainer ranks, engines, and the processes of the other roles."""
        yield from self.ranks
        for hosts in self.engines:
            yield from hosts
        for of_section in self.guests.values():
            yield from of_section
        yield from self.gateways


def plan_processes(
    config: Config, guests: Mapping[str, Guests], *, with_engines: bool, with_trainers: bool = True
) -> ProcessPlan:
    """Plan the processes of a run.

    guests: processes of other roles, by their name in messages, such as "critic rank".
    with_engines: False for supervised training.
    with_trainers: False for a run that only generates: engines then have GPUs of their own, and guests have none.

    Raises: ConfigError if the processes do not fit the nodes.
    """
    cluster, rollout, on_gpus = config.cluster, config.rollout, config.cluster.uses_cuda
    num_ranks = config.num_trainer_ranks
    if not with_trainers:
        # Without trainer ranks there is nobody to share a GPU with.
        cluster, num_ranks = replace(cluster, placement="disaggregated"), 0
    num_engines = rollout.num_engines if with_engines else 0
    placement = place(
        cluster, rollout, num_ranks, on_gpus=on_gpus, num_engines=num_engines, guests=list(guests.values())
    )

    def planned(name: str, section: str, slot: Slot, num_cpus: int, num_gpus: int = 0) -> PlannedProcess:
        peers = placement.peers(section, slot.node)
        return PlannedProcess(name, section, slot.node, num_cpus, num_gpus, _sharers(placement, slot), peers)

    ranks = [
        planned(f"trainer rank {rank}", "actor", Slot(node, None), 1, int(on_gpus))
        for rank, node in enumerate(placement.ranks)
    ]
    engines = []
    for number, slots in enumerate(placement.engines):
        size = rollout.tp // len(slots)
        names = engine_names(f"rollout engine {number}", len(slots))
        # A slot without places reserves its own GPUs.
        engines.append(
            tuple(
                planned(name, "rollout", slot, size, size if on_gpus and slot.places is None else 0)
                for name, slot in zip(names, slots, strict=True)
            )
        )
    of_guests = {
        each.section: tuple(
            planned(f"{name} {index}", each.section, slot, each.num_cpus)
            for index, slot in enumerate(placement.guests[each.section])
        )
        for name, each in guests.items()
    }
    nodes = sorted({hosts[0].node for hosts in engines}) if episode_of(rollout) in WITH_GATEWAY else []
    gateways = [PlannedProcess(f"gateway {number}", "rollout", node, 0, 0, (), 1) for number, node in enumerate(nodes)]
    return ProcessPlan(placement, tuple(ranks), tuple(engines), of_guests, tuple(gateways))


def engine_names(name: str, num_hosts: int) -> list[str]:
    """Return the names of the processes of the engine `name`, the leading one first."""
    return [name, *(f"{name}, host {host} of {num_hosts}" for host in range(2, num_hosts + 1))]


def _sharers(placement: RunPlacement, slot: Slot) -> tuple[int, ...]:
    """Return the trainer ranks whose GPUs the slot uses."""
    here = [rank for rank, node in enumerate(placement.ranks) if node == slot.node]
    return tuple(here[place] for place in slot.places or ())
