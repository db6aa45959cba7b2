"""Choice of senders: near the receiver, few for each receiver, equally loaded; and the peers of 512 ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.routes import RouteMap
from mcore_rl.weights.slices.senders import RankLocations, choose_senders
from mcore_rl.weights.slices.shard_map import IntArray, ShardMap
from mcore_rl.weights.slices.totals import Totals, count
from model_converters.families import family_for
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement
from model_converters.mapping.table import bind
from tests.readme import ROOT

NODES, GPUS = 64, 8


def nodes(first: int, number: int, gpus: int = GPUS) -> list[tuple[int, int]]:
    """Return (host, device) of the ranks on `number` nodes from `first` on, one per GPU."""
    return [(node, node * GPUS + gpu) for node in range(first, first + number) for gpu in range(gpus)]


def chosen(
    num_bytes: dict[range, list[int]], trainers: list[tuple[int, int]], engines: list[tuple[int, int]]
) -> dict[range, list[set[int]]]:
    """Return the possible senders of each engine rank."""
    arrays = {holders: np.array(of_ranks) for holders, of_ranks in num_bytes.items()}
    choices = choose_senders(arrays, RankLocations.of(trainers, engines), 4)
    return {holders: [set(row) for row in senders.tolist()] for holders, senders in choices.items()}


def test_replica_on_the_receivers_node_is_preferred_and_balanced() -> None:
    """Experts of two replicas on two nodes; the engine on node 1 receives from there, on node 2 from both in turns."""
    experts = range(0, 16, 4)  # ranks 0, 4 on node 0 and 8, 12 on node 1
    (senders,) = chosen({experts: [1] * 12}, nodes(0, 2), [*nodes(1, 1), *nodes(2, 1, gpus=4)]).values()
    assert all(row <= {8, 12} and len(row) == 1 for row in senders[:8])
    assert (senders[0], senders[4]) == ({8}, {12})  # the same GPU
    assert sorted(rank for row in senders[:8] for rank in row) == [8] * 4 + [12] * 4
    assert sorted(rank for row in senders[8:] for rank in row) == [0, 4, 8, 12]


def test_shard_without_receivers_has_senders_that_are_never_used() -> None:
    """Shards of padding: two holders, and no engine rank that needs a part."""
    padding, shared = range(2), range(2, 4)
    choices = chosen({padding: [0] * 4, shared: [1] * 4}, nodes(0, 1), nodes(1, 1, gpus=4))
    assert choices[padding] == [{0}] * 4
    assert set().union(*choices[shared]) == {2, 3}


def test_receivers_elsewhere_use_the_same_replica_for_all_experts() -> None:
    """Four experts, each on four of 16 ranks; every engine rank needs all of them."""
    experts = {range(first, 16, 4): [1] * 8 for first in range(4)}
    choices = chosen(experts, nodes(0, 2), nodes(2, 1)).values()
    for rank in range(8):
        senders = [rank_set for senders in choices for rank_set in senders[rank]]
        assert len({sender // 4 for sender in senders}) == 1


def test_dense_shard_comes_from_a_rank_that_sends_experts_anyway() -> None:
    """Expert e is on rank e alone, and engine rank e needs it. All ranks hold the dense weights."""
    experts = {range(e, e + 1): [int(e == rank % 4) for rank in range(8)] for e in range(4)}
    choices = chosen(experts | {range(4): [9] * 8}, nodes(0, 1, gpus=4), nodes(1, 1))
    assert choices[range(4)] == [{rank % 4} for rank in range(8)]


def test_dense_shard_avoids_peers_that_would_send_most_of_it() -> None:
    """The only experts are on rank 0: it would send everything."""
    choices = chosen({range(1): [1] * 8, range(4): [9] * 8}, nodes(0, 1, gpus=4), nodes(1, 1))
    assert sorted(rank for row in choices[range(4)] for rank in row) == sorted([*range(4)] * 2)


def test_receivers_elsewhere_use_their_rail() -> None:
    """GPU i of every node is connected to the same switch."""
    (senders,) = chosen({range(16): [1] * 16}, nodes(0, 2), nodes(2, 2)).values()
    assert all({rank % 8 for rank in row} == {receiver % 8} for receiver, row in enumerate(senders))


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_balanced_and_have_few_pairs(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_holders, num_receivers = random.integers(2, 40, 2).tolist()
    num_bytes: IntArray = random.integers(50, 100, num_receivers)
    engines = [(1, -1)] * num_receivers
    (choices,) = choose_senders(
        {range(num_holders): num_bytes}, RankLocations.of([(0, -1)] * num_holders, engines), 1
    ).values()
    rows = [sorted(set(row)) for row in choices.tolist()]
    assert sum(map(len, rows)) <= num_holders + num_receivers
    assert {rank for row in rows for rank in row} == set(range(num_holders)) or num_receivers < num_holders
    load = np.zeros(num_holders)
    for row, size in zip(rows, num_bytes.tolist(), strict=True):
        load[row] += size / len(row)  # about: the router gives the next slice to the one that has sent least
    assert load.max() <= 2 * max(load.mean(), num_bytes.max() / max(1, num_holders // num_receivers))


def deepseek_v3(layout: TrainLayout, *, expert_parallel: bool) -> Totals:
    """Count a sync of DeepSeek-V3 on 64 nodes, with 16 colocated engines of 32 ranks."""
    config: dict[str, Any] = json.loads((ROOT / "configs/models/DeepSeek-V3/config.json").read_text())
    rows = bind(family_for(config).rows(config), config, torch.bfloat16)
    devices = nodes(0, NODES)
    shard_map = ShardMap(rows, EngineLayout(tp=32, expert_parallel=expert_parallel))
    return count(RouteMap(Placement(rows, layout), shard_map, RankLocations.of(devices, devices)), 256 << 20)


@pytest.mark.parametrize(
    ("layout", "expert_parallel", "most", "before"),
    [
        # Whole experts per engine rank: the sender of its experts in each of the other stages sends the rest, too.
        ({"ep": 32}, True, 15, 15),
        # Four replicas of each expert.
        ({"ep": 8}, True, 36, 49),
        # Slices of all experts: a receiver needs all expert-parallel ranks of all stages, and a sender serves all.
        ({"ep": 32}, False, 511, 511),
    ],
)
def test_peers_of_512_ranks_are_few(layout: dict[str, int], expert_parallel: bool, most: int, before: int) -> None:
    assert most <= before
    trainer = TrainLayout(512, pp=16, first_stage_layers=3, last_stage_layers=2, **layout)
    totals = deepseek_v3(trainer, expert_parallel=expert_parallel)
    assert 0 < int(totals.peers[:512].max()) <= most
    assert int(totals.peers[512:].max()) == 0  # colocated engine ranks receive through the trainer ranks' buffers
    assert totals.received.tolist() == totals.needed.tolist() * 16  # no byte more than needed
    assert int(totals.sent.max()) <= 1.3 * totals.sent.mean()
