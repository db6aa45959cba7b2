"""Who takes part in a fabric test and what is measured in which order; every process computes the same plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Fabric:
    """The nodes under test, in order, each with `slots` consecutive ranks. `device` is cuda or cpu."""

    hosts: tuple[str, ...]
    slots: int
    device: str

    @property
    def num_ranks(self) -> int:
        return len(self.hosts) * self.slots

    def node_of(self, rank: int) -> int:
        return rank // self.slots

    def ranks_of(self, node: int) -> tuple[int, ...]:
        return tuple(range(node * self.slots, (node + 1) * self.slots))

    def device_name(self, rank: int) -> str:
        """By its index on the node: GPU 3; on CPU slot 3."""
        return f"{'GPU' if self.device == 'cuda' else 'slot'} {rank % self.slots}"

    def rank_name(self, rank: int) -> str:
        return f"rank {rank} ({self.hosts[self.node_of(rank)]}, {self.device_name(rank)})"


class Subject(Enum):
    """What one figure of a stage is about, and so what it is compared with."""

    DEVICE = "device"
    NODE = "node"
    LINK = "link"
    WHOLE = "whole"


@dataclass(frozen=True)
class Stage:
    """One measurement, made by all ranks at the same time, or by the groups of ranks that communicate in it. Stages of
    one name are parts of one measurement: their figures are compared with each other. Its `probe` is a key of
    bench.PROBES, its `unit` None where nothing is measured."""

    name: str
    probe: str
    subject: Subject
    unit: str | None
    groups: tuple[tuple[int, ...], ...] = ()

    def group_of(self, rank: int) -> tuple[int, ...] | None:
        """The ranks that this one communicates with, itself included; None where it has no part."""
        return next((group for group in self.groups if rank in group), None)


TFLOPS, BANDWIDTH = "TFLOP/s", "GiB/s"


def stages(fabric: Fabric) -> list[Stage]:
    """In the order in which they are run: what needs one device, one node, two nodes, all. So the fewest wait for what
    is broken when it shows."""
    nodes = range(len(fabric.hosts))
    plan = [
        Stage("start", "start", Subject.DEVICE, None),
        Stage("matrix product", "matrix_product", Subject.DEVICE, TFLOPS),
        Stage("copy on the device", "copy", Subject.DEVICE, BANDWIDTH),
        Stage("copy from host to device", "copy_to_device", Subject.DEVICE, BANDWIDTH),
        Stage("copy from device to host", "copy_to_host", Subject.DEVICE, BANDWIDTH),
    ]
    if fabric.slots > 1:
        inside = tuple(fabric.ranks_of(node) for node in nodes)
        plan.append(Stage("all-reduce in a node", "all_reduce", Subject.NODE, BANDWIDTH, inside))
    for pairs in rounds_of_neighbours(len(fabric.hosts)):
        # Slot by slot, all at once: where every device has a network card of its own, that is the one which it uses.
        links = tuple(
            (a, b) for one, other in pairs for a, b in zip(fabric.ranks_of(one), fabric.ranks_of(other), strict=True)
        )
        plan.append(Stage("all-reduce between two nodes", "all_reduce", Subject.LINK, BANDWIDTH, links))
    if len(fabric.hosts) > 1:
        everyone = (tuple(range(fabric.num_ranks)),)
        plan.append(Stage("all-reduce of all nodes", "all_reduce", Subject.WHOLE, BANDWIDTH, everyone))
    return plan


def rounds_of_neighbours(num_nodes: int) -> list[list[tuple[int, int]]]:
    """The ring of the nodes, cut into rounds in which no node has more than one partner.

    Every node is in two pairs, so that a slow link can be told from a slow node, with a number of measurements that
    grows with the number of nodes only. An odd ring needs a third round; two nodes have one pair.
    """
    if num_nodes < 2:
        return []
    ring = [(node, (node + 1) % num_nodes) for node in range(num_nodes if num_nodes > 2 else 1)]
    closing = [ring.pop()] if len(ring) % 2 and len(ring) > 1 else []
    return [pairs for pairs in (ring[::2], ring[1::2], closing) if pairs]
