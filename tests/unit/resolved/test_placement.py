"""Ranks fill nodes in order, engines share their node's slots or have their own, and wide engines fill nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.resolved import placement
from mcore_rl.resolved.placement import Guests, RunPlacement, visible_devices
from mcore_rl.runtime.addresses import EPHEMERAL, free_port
from mcore_rl.runtime.cluster import natural


def config(nodes: int, slots: int, *, tp: int = 1, placement: str = "colocated", ranks: int | None = None) -> Config:
    made = Config()
    made.cluster.nodes, made.cluster.gpus_per_node, made.cluster.placement = nodes, slots, placement
    made.rollout.tp, made.actor.num_ranks = tp, ranks
    return made


def place(made: Config, *, on_gpus: bool, num_engines: int, guests: Sequence[Guests] = ()) -> RunPlacement:
    sections = made.cluster, made.rollout, made.num_trainer_ranks
    return placement.place(*sections, on_gpus=on_gpus, num_engines=num_engines, guests=guests)


def test_place_ranks_fill_nodes_in_order() -> None:
    found = place(config(3, 4), on_gpus=True, num_engines=0)
    assert found.ranks == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2)
    assert found.bundle == {"CPU": 4.0, "GPU": 4.0}


def test_place_colocated_engines_cover_the_ranks() -> None:
    found = place(config(2, 8, tp=4), on_gpus=True, num_engines=4)
    assert [(slot.node, slot.places) for (slot,) in found.engines] == [
        (0, (0, 1, 2, 3)),
        (0, (4, 5, 6, 7)),
        (1, (0, 1, 2, 3)),
        (1, (4, 5, 6, 7)),
    ]
    assert found.bundle == {"CPU": 16.0, "GPU": 8.0}


def test_place_few_engines_spread_over_nodes() -> None:
    found = place(config(4, 8, tp=2), on_gpus=True, num_engines=6)
    assert [slot.node for (slot,) in found.engines] == [0, 0, 1, 2, 2, 3]
    assert [slot.places for (slot,) in found.engines] == [(0, 1), (2, 3), (0, 1), (0, 1), (2, 3), (0, 1)]


def test_place_disaggregated_engines_follow_the_ranks() -> None:
    found = place(config(2, 8, tp=2, placement="disaggregated", ranks=9), on_gpus=True, num_engines=3)
    assert [slot.node for (slot,) in found.engines] == [1, 1, 1]
    assert [slot.places for (slot,) in found.engines] == [None] * 3
    assert found.bundle["GPU"] == 8.0


def test_peers_alternating_processes_share_cores() -> None:
    guests = [Guests("critic", 3), Guests("judge", 1, tp=2)]
    colocated = place(config(1, 4), on_gpus=False, num_engines=1, guests=guests)
    assert [colocated.peers(section, 0) for section in ("actor", "rollout", "critic", "judge")] == [4, 1, 3, 2]
    apart = place(config(1, 8, tp=2, placement="disaggregated", ranks=3), on_gpus=False, num_engines=2, guests=guests)
    assert [apart.peers(section, 0) for section in ("actor", "rollout", "critic", "judge")] == [7, 7, 7, 7]
    wide = place(config(3, 2, tp=4, placement="disaggregated", ranks=2), on_gpus=False, num_engines=1)
    assert [wide.peers("actor", 0), wide.peers("rollout", 1), wide.peers("rollout", 2)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("made", "num_engines", "key"),
    [
        (config(2, 8, tp=12), 1, r"rollout\.tp=12: .* multiple of cluster\.gpus_per_node=8"),
        (config(2, 8, tp=32), 1, r"span 4 nodes .* 2 of cluster\.nodes=2"),
        (config(3, 8, tp=16), 2, r"span 4 nodes .* 3 of cluster\.nodes=3"),
        (config(2, 8, tp=16, placement="disaggregated", ranks=8), 1, r"span 2 nodes .* 1 of cluster\.nodes=2"),
        (config(2, 2, tp=1), 5, "rollout.num_engines"),
        (config(2, 8, tp=2, placement="disaggregated", ranks=11), 3, "actor.num_ranks"),
        (config(2, 8, placement="disaggregated"), 1, "actor.num_ranks"),
        (config(1, 8, tp=16, placement="disaggregated", ranks=4), 1, "rollout.tp"),
    ],
)
def test_place_engines_without_room_are_rejected(made: Config, num_engines: int, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        place(made, on_gpus=True, num_engines=num_engines)


def test_place_on_cpu_requires_no_gpu() -> None:
    found = place(config(2, 1), on_gpus=False, num_engines=1)
    assert [slot.places for (slot,) in found.engines] == [None]
    assert found.bundle == {"CPU": 2.0}


def test_place_guests_share_gpus_and_add_cpus() -> None:
    guests = [Guests("critic", 5), Guests("reward_model", 2), Guests("judge", 3, tp=2)]
    found = place(config(2, 4, tp=4), on_gpus=True, num_engines=2, guests=guests)
    assert [(slot.node, slot.places) for slot in found.guests["critic"]] == [*((0, (i,)) for i in range(4)), (1, (0,))]
    assert [(slot.node, slot.places) for slot in found.guests["reward_model"]] == [(0, (0,)), (0, (1,))]
    assert [(slot.node, slot.places) for slot in found.guests["judge"]] == [(0, (0, 1)), (0, (2, 3)), (1, (0, 1))]
    # The first node has its trainer ranks, an engine, four critics, two reward models and two judges.
    assert found.bundle == {"CPU": 4.0 + 4 + 4 + 2 + 2 * 2, "GPU": 4.0}


def test_visible_devices_guests_use_the_devices_of_ranks() -> None:
    """Ray assigns GPUs in any order, and from an inherited CUDA_VISIBLE_DEVICES=4,5,6,7, as on the first node."""
    placed = place(config(2, 4, tp=2), on_gpus=True, num_engines=4)
    of_ranks = ["5", "4", "7", "6", "GPU-a", "GPU-b", "GPU-c", "GPU-d"]
    seen = [visible_devices(placed, slot, of_ranks) for (slot,) in placed.engines]
    assert seen == ["5,4", "7,6", "GPU-a,GPU-b", "GPU-c,GPU-d"]
    own = place(config(1, 4, placement="disaggregated", ranks=2), on_gpus=True, num_engines=1)
    assert visible_devices(own, own.engines[0][0], ["0", "1"]) is None


def test_place_colocated_engines_stay_within_the_ranks() -> None:
    """Ray reserves no other GPUs of the node for the run."""
    assert place(config(1, 4, ranks=2), on_gpus=True, num_engines=2).engines[1][0].places == (1,)
    with pytest.raises(ConfigError, match=r"rollout\.num_engines=3 .* GPUs of 2 trainer ranks"):
        place(config(1, 4, ranks=2), on_gpus=True, num_engines=3)


def test_place_guests_use_nodes_with_trainer_ranks_only() -> None:
    """Two nodes have engines of the rollout only, so that they lend no GPUs of trainer ranks."""
    made = config(4, 8, tp=8, placement="disaggregated", ranks=16)
    found = place(made, on_gpus=True, num_engines=2, guests=[Guests("teacher", 2, tp=4)])
    assert [(slot.node, slot.places) for slot in found.guests["teacher"]] == [(0, (0, 1, 2, 3)), (1, (0, 1, 2, 3))]


@pytest.mark.parametrize(
    ("guests", "key"),
    [
        (Guests("judge", 3, tp=2), r"judge\.num_engines=3 of judge\.tp=2"),
        (
            Guests("teacher", 6, 1, models=3),
            r"teacher\.num_engines=2 for each of 3 models \(6 engines\) of teacher\.tp=1",
        ),
    ],
)
def test_place_guests_without_room_are_rejected(guests: Guests, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        place(config(1, 4), on_gpus=True, num_engines=0, guests=[guests])


def test_place_wide_engines_fill_whole_nodes() -> None:
    found = place(config(4, 8, tp=16), on_gpus=True, num_engines=2)
    assert [[(slot.node, slot.places) for slot in hosts] for hosts in found.engines] == [
        [(0, tuple(range(8))), (1, tuple(range(8)))],
        [(2, tuple(range(8))), (3, tuple(range(8)))],
    ]
    assert found.bundle == {"CPU": 16.0, "GPU": 8.0}
    on_cpu = place(config(2, 1, tp=2), on_gpus=False, num_engines=1)
    assert [[(slot.node, slot.places) for slot in hosts] for hosts in on_cpu.engines] == [[(0, None), (1, None)]]


@pytest.mark.parametrize(("ranks", "nodes", "first"), [(8, 0, 1), (9, 0, 2), (None, 2, 2)])
def test_place_wide_disaggregated_engines_follow_the_ranks(ranks: int | None, nodes: int, first: int) -> None:
    made = config(4, 8, tp=16, placement="disaggregated", ranks=ranks)
    made.rollout.nodes = nodes
    found = place(made, on_gpus=True, num_engines=1)
    assert [slot.node for slot in found.engines[0]] == [first, first + 1]
    assert len(found.ranks) == (ranks or 16)


def test_place_reserved_engine_nodes_are_the_last() -> None:
    made = config(3, 2, placement="disaggregated")
    made.rollout.nodes = 1
    for on_gpus in (False, True):
        found = place(made, on_gpus=on_gpus, num_engines=2)
        assert found.ranks == (0, 0, 1, 1)
        assert [slot.node for (slot,) in found.engines] == [2, 2]


def test_reserved_port_is_outside_the_ephemeral_range() -> None:
    assert 1024 <= free_port() < int(EPHEMERAL.read_text().split()[0])


def test_nodes_are_sorted_by_numbers_in_their_names() -> None:
    assert sorted(["gpu10-b", "gpu2-b", "gpu2-a", "cpu"], key=natural) == ["cpu", "gpu2-a", "gpu2-b", "gpu10-b"]
