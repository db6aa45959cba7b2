"""Stages of a fabric test. Every process derives the same plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mcore_rl.doctor.fabric.bench import Bench

Groups = dict[tuple[int, ...], str]


@dataclass(frozen=True)
class Fabric:
    """Nodes under test in order, each with `slots` consecutive ranks. device: cuda or cpu."""

    hosts: tuple[str, ...]
    slots: int
    device: str

    @property
    def num_ranks(self) -> int:
        return len(self.hosts) * self.slots

    def host_of(self, rank: int) -> str:
        return self.hosts[rank // self.slots]

    def ranks_of(self, node: int) -> tuple[int, ...]:
        return tuple(range(node * self.slots, (node + 1) * self.slots))

    def device_name(self, rank: int) -> str:
        """Return kind and index of the rank's device on its node: `GPU 3`, or `slot 3` on CPU."""
        return f"{'GPU' if self.device == 'cuda' else 'slot'} {rank % self.slots}"

    def rank_name(self, rank: int) -> str:
        return f"rank {rank} ({self.host_of(rank)}, {self.device_name(rank)})"


@dataclass(frozen=True)
class Stage:
    """One measurement on all ranks at the same time.

    Stages with the same name are parts of one measurement, whose values are compared with each other.

    probe: measurement, in `unit`.
    unit: None if the probe only checks.
    groups: ranks that communicate with each other -> name for the report. Single ranks if the stage does not
    communicate; ranks in no group are idle.
    """

    name: str
    probe: Callable[[Bench], float | None]
    unit: str | None
    groups: Groups

    def group_of(self, rank: int) -> tuple[int, ...] | None:
        return next((group for group in self.groups if rank in group), None)


class StageResult(NamedTuple):
    """Outcome of one stage on one rank: a measured value or an error; neither in stages that only check.

    died: True if the process ended without writing a result.
    device: name of the device and versions of its libraries.
    """

    value: float | None = None
    error: str | None = None
    died: bool = False
    device: str = ""


def result_key(number: int, rank: int) -> str:
    """Return the store's key for a rank's result of a stage."""
    return f"{stage_key(number)} rank {rank}"


def stage_key(number: int) -> str:
    """Return the store's key for the results of all ranks, which node 0 writes when the stage has ended."""
    return f"stage {number}"


BANDWIDTH = "GiB/s"


def stages(fabric: Fabric) -> list[Stage]:
    """Return the stages in order: one device, one node, two nodes, all nodes.

    A fault therefore appears first in the smallest stage that it affects, where the fewest ranks wait.
    """
    hosts = fabric.hosts
    devices: Groups = {(rank,): fabric.rank_name(rank) for rank in range(fabric.num_ranks)}
    # These stages do not communicate, so a broken device cannot delay or fail other ranks.
    plan = [
        Stage("start", Bench.start, None, devices),
        Stage("matrix product", Bench.matrix_product, "TFLOP/s", devices),
        Stage("copy on the device", Bench.copy, BANDWIDTH, devices),
        Stage("copy from host to device", Bench.copy_to_device, BANDWIDTH, devices),
        Stage("copy from device to host", Bench.copy_to_host, BANDWIDTH, devices),
    ]
    if fabric.slots > 1:
        inside = map(fabric.ranks_of, range(len(hosts)))
        nodes: Groups = {r: f"{host} (ranks {r[0]}-{r[-1]})" for host, r in zip(hosts, inside, strict=True)}
        plan.append(Stage("all-reduce in a node", Bench.all_reduce, BANDWIDTH, nodes))
    for pairs in rounds_of_neighbours(len(hosts)):
        # Slot i communicates with slot i of the other node, all slots at once, so that each device uses its own network
        # card if it has one.
        links: Groups = {
            (a, b): f"{hosts[one]} - {hosts[other]}, {fabric.device_name(a)}"
            for one, other in pairs
            for a, b in zip(fabric.ranks_of(one), fabric.ranks_of(other), strict=True)
        }
        plan.append(Stage("all-reduce between two nodes", Bench.all_reduce, BANDWIDTH, links))
    if len(hosts) > 1:
        everyone: Groups = {tuple(range(fabric.num_ranks)): "all nodes"}
        plan.append(Stage("all-reduce of all nodes", Bench.all_reduce, BANDWIDTH, everyone))
    return plan


def rounds_of_neighbours(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Split the ring of nodes into rounds in which every node has at most one partner.

    Every node is in two pairs, which distinguishes a slow link from a slow node; the number of pairs grows linearly.
    An odd ring needs a third round; two nodes have one pair.
    """
    if num_nodes < 2:
        return []
    # Two nodes form one pair: the pairs (0, 1) and (1, 0) would measure the same link twice.
    ring = [(node, (node + 1) % num_nodes) for node in range(num_nodes if num_nodes > 2 else 1)]
    closing = [ring.pop()] if len(ring) % 2 and len(ring) > 1 else []
    return [pairs for pairs in (ring[::2], ring[1::2], closing) if pairs]
