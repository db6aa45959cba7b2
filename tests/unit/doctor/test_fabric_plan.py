"""What is measured between whom: every device, every node, and a ring of nodes whose size grows with the nodes."""

from __future__ import annotations

import pytest

from mcore_rl.doctor.fabric.plan import Fabric, Subject, rounds_of_neighbours, stages


def fabric(num_nodes: int, slots: int) -> Fabric:
    return Fabric(tuple(f"n{node}" for node in range(num_nodes)), slots, "cuda")


@pytest.mark.parametrize("num_nodes", [3, 4, 5, 8, 9, 64])
def test_every_node_is_in_two_pairs_and_in_no_round_twice(num_nodes: int) -> None:
    rounds = rounds_of_neighbours(num_nodes)
    assert len(rounds) == 2 + num_nodes % 2
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(set(pairs)) == len(pairs) == num_nodes
    assert all(sum(node in pair for pair in pairs) == 2 for node in range(num_nodes))


def test_few_nodes_have_few_pairs() -> None:
    assert rounds_of_neighbours(1) == []
    assert rounds_of_neighbours(2) == [[(0, 1)]]


def test_a_node_alone_communicates_inside_and_a_device_alone_not_at_all() -> None:
    assert [stage.groups for stage in stages(fabric(1, 4)) if stage.groups] == [((0, 1, 2, 3),)]
    assert not [stage for stage in stages(fabric(1, 1)) if stage.groups]


def test_nodes_communicate_inside_then_two_by_two_slot_by_slot_then_all() -> None:
    groups = [(stage.subject, stage.groups) for stage in stages(fabric(3, 2)) if stage.groups]
    assert groups == [
        (Subject.NODE, ((0, 1), (2, 3), (4, 5))),
        (Subject.LINK, ((0, 2), (1, 3))),
        (Subject.LINK, ((2, 4), (3, 5))),
        (Subject.LINK, ((4, 0), (5, 1))),
        (Subject.WHOLE, ((0, 1, 2, 3, 4, 5),)),
    ]


def test_ranks_are_named_by_host_and_device() -> None:
    assert fabric(2, 8).rank_name(11) == "rank 11 (n1, GPU 3)"
    assert Fabric(("a",), 2, "cpu").rank_name(1) == "rank 1 (a, slot 1)"
