"""Plan of the fabric test: devices, nodes, a ring of links, all nodes."""

from __future__ import annotations

import pytest

from mcore_rl.doctor.fabric.bench import Bench
from mcore_rl.doctor.fabric.plan import Fabric, rounds_of_neighbours, stages


def fabric(num_nodes: int, slots: int) -> Fabric:
    return Fabric(tuple(f"n{node}" for node in range(num_nodes)), slots, "cuda")


@pytest.mark.parametrize("num_nodes", [3, 4, 5, 8, 9, 64])
def test_every_node_is_in_two_pairs_of_different_rounds(num_nodes: int) -> None:
    rounds = rounds_of_neighbours(num_nodes)
    assert len(rounds) == 2 + num_nodes % 2
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))
    ring = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(set(ring)) == len(ring) == num_nodes
    assert all(sum(node in pair for pair in ring) == 2 for node in range(num_nodes))


def test_one_and_two_nodes_have_no_ring() -> None:
    assert rounds_of_neighbours(1) == []
    assert rounds_of_neighbours(2) == [[(0, 1)]]


def collectives(num_nodes: int, slots: int) -> list[tuple[tuple[int, ...], ...]]:
    return [tuple(stage.groups) for stage in stages(fabric(num_nodes, slots)) if stage.probe is Bench.all_reduce]


def test_single_node_and_single_device_have_no_links() -> None:
    assert collectives(1, 4) == [((0, 1, 2, 3),)]
    assert collectives(1, 1) == []


def test_collectives_grow_from_node_to_links_to_all() -> None:
    assert collectives(3, 2) == [
        ((0, 1), (2, 3), (4, 5)),
        ((0, 2), (1, 3)),
        ((2, 4), (3, 5)),
        ((4, 0), (5, 1)),
        ((0, 1, 2, 3, 4, 5),),
    ]
    assert list(stages(fabric(3, 2))[6].groups.values()) == ["n0 - n1, GPU 0", "n0 - n1, GPU 1"]


def test_rank_name_contains_host_and_device() -> None:
    assert fabric(2, 8).rank_name(11) == "rank 11 (n1, GPU 3)"
    assert Fabric(("a",), 2, "cpu").rank_name(1) == "rank 1 (a, slot 1)"
