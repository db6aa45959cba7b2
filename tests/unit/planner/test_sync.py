"""Bytes, memory and space of a weight sync through files."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mcore_rl.config.schema import Config
from mcore_rl.planner.report import sync_rows
from mcore_rl.planner.sync import SyncAmounts, WeightSync, weight_sync
from mcore_rl.weights.frozen import TrainedWeights, frozen_rows
from mcore_rl.weights.slices.engine_layout import EngineLayout
from model_converters.families import family_for
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.table import bind
from tests.tiny_models import tiny_fields
from tests.unit.weights.transfer import sync_plan

MIB = 2**20


def planned(transport: str, *, cuda: bool, delta: bool = False) -> WeightSync:
    """Plan a sync from two trainer ranks on one host to two engines on another."""
    config, fields = Config(), tiny_fields("qwen3", vocab_size=97)
    config.cluster = replace(config.cluster, nodes=2, gpus_per_node=2, placement="disaggregated")
    config.rollout = replace(config.rollout, nodes=1, num_engines=2, tp=1)
    config.weights = replace(config.weights, transport=transport, bucket_mib=1.0, delta=delta)
    config.plan.network_gib_per_second = 1.0
    rows = bind(family_for(fields).rows(fields), fields, torch.float32)
    return weight_sync(config, rows, TrainLayout(2), cuda=cuda)


@pytest.mark.parametrize("cuda", [True, False])
def test_files_are_written_once_and_read_by_every_engine(cuda: bool) -> None:
    files, network = planned("files", cuda=cuda), planned("network", cuda=cuda)
    weights = network.floor_bytes_per_engine_rank
    assert files.bytes_per_engine_rank == weights
    assert files.total_bytes == network.total_bytes == 2 * weights
    assert (files.bytes_crossing_hosts, network.bytes_crossing_hosts) == (3 * weights, 2 * weights)
    assert files.busiest_sender_bytes < 0.6 * weights
    assert (files.max_peers, files.transport) == (0, "files")
    assert files.seconds == weights / 2**30


@pytest.mark.parametrize("cuda", [True, False])
def test_files_take_two_versions_of_space_and_the_engines_host_memory(cuda: bool) -> None:
    files = planned("files", cuda=cuda)
    weights, slots = files.floor_bytes_per_engine_rank, min(2, files.buckets) * MIB
    assert files.directory_bytes == 2 * weights
    assert files.slots_bytes == 2 * (weights + slots)
    assert planned("network", cuda=cuda).directory_bytes == 0


def test_deltas_in_files_need_copies_on_the_fullest_host() -> None:
    files = planned("files", cuda=True, delta=True)
    assert files.copies_bytes == 2 * files.floor_bytes_per_engine_rank  # both engines are on one host
    assert planned("files", cuda=True).copies_bytes == 0


@pytest.mark.parametrize("transport", ["auto", "shared_memory", "network"])
@pytest.mark.parametrize("tp", [1, 2])
def test_copies_are_those_of_the_messages_that_a_run_sends(transport: str, tp: int) -> None:
    """Four engines of one rank share two buffers, unless each receives over the network."""
    config, fields, layout = Config(), tiny_fields("qwen3", vocab_size=97), TrainLayout(4, pp=2)
    config.cluster = replace(config.cluster, nodes=2, gpus_per_node=2, placement="colocated")
    config.rollout = replace(config.rollout, num_engines=4 // tp, tp=tp)
    config.weights = replace(config.weights, transport=transport, bucket_mib=1.0, delta=True)
    rows = bind(family_for(fields).rows(fields), fields, torch.float32)
    run = sync_plan(
        fields, layout, EngineLayout(tp=tp), "AABB", "AABB", bucket_bytes=MIB, transport=transport, delta=True
    )
    copies = {"A": 0, "B": 0}
    topology = run.topology
    for rank, sender in enumerate(topology.trainers):
        for message in (each for of_round in run.outgoing(rank).values() for each in of_round):
            if topology.sends_delta(message.receiver, rank):
                receiver = topology.engines[topology.buffers[message.receiver].readers[0]]
                copies[sender.host.name] += message.num_bytes
                copies[receiver.host.name] += message.num_bytes
    assert max(copies.values()) > 0
    # Messages also have padding between tensors, which the plan does not count.
    assert weight_sync(config, rows, layout, cuda=False).copies_bytes == pytest.approx(max(copies.values()), rel=0.02)


@pytest.mark.parametrize("transport", ["network", "files"])
def test_later_syncs_lack_frozen_weights_unless_engines_discard_them(transport: str) -> None:
    fields = tiny_fields("qwen3_moe", vocab_size=97)
    rows, layout = bind(family_for(fields).rows(fields), fields, torch.float32), TrainLayout(2)
    frozen = frozen_rows(fields, layout, TrainedWeights(adapters=()))
    attention = sum(4 * math.prod(shape) for row in rows for shape in row.row.shapes
                    if row.mcore.endswith(("linear_qkv.weight", "linear_proj.weight")))  # fmt: skip
    config = Config()
    config.cluster = replace(config.cluster, nodes=2, gpus_per_node=2, placement="disaggregated")
    config.rollout = replace(config.rollout, nodes=1, num_engines=2, tp=1)
    config.weights = replace(config.weights, transport=transport, bucket_mib=0.05)
    config.plan.network_gib_per_second = 1.0
    whole = weight_sync(config, rows, layout, cuda=True)
    assert whole.later is None
    sync = weight_sync(config, rows, layout, cuda=True, frozen=frozen)
    later = sync.later
    assert later is not None
    # Files of a whole version and a later one need less space. Senders of frozen and of other weights are chosen apart.
    differing = {"directory_bytes": whole.directory_bytes, "busiest_sender_bytes": whole.busiest_sender_bytes}
    assert replace(sync, later=None, **differing) == whole
    assert sync.busiest_sender_bytes == pytest.approx(whole.busiest_sender_bytes, rel=0.01)
    assert later.bytes_per_engine_rank == later.floor_bytes_per_engine_rank == attention
    assert whole.bytes_per_engine_rank > 2 * attention
    assert later.total_bytes == 2 * attention
    assert later.buckets < whole.buckets / 2
    assert later.busiest_sender_bytes < whole.busiest_sender_bytes
    assert later.seconds == pytest.approx(attention / 2**30, rel=0.1)
    files = transport == "files"
    assert later.bytes_crossing_hosts == (3 if files else 2) * attention
    assert sync.directory_bytes == (whole.bytes_per_engine_rank + attention if files else 0)
    config.cluster = replace(config.cluster, placement="colocated")
    config.rollout = replace(config.rollout, nodes=None, num_engines=4)
    config.weights = replace(config.weights, transport="auto")
    assert weight_sync(config, rows, TrainLayout(4), cuda=True, frozen=frozen).later is None


def test_report_has_a_row_for_later_syncs_without_frozen_weights() -> None:
    whole = planned("network", cuda=True)
    ((name, text),) = sync_rows(whole)
    assert name == "weight sync"
    assert "later" not in text
    later = SyncAmounts(
        bytes_per_engine_rank=3 << 30,
        floor_bytes_per_engine_rank=2 << 30,
        buckets=5,
        total_bytes=6 << 30,
        bytes_crossing_hosts=4 << 30,
        busiest_sender_bytes=1 << 30,
        seconds=1.5,
    )
    rows = dict(sync_rows(replace(whole, later=later)))
    assert rows.pop("weight sync") == text
    assert rows == {
        "later syncs": "3.00 GiB per engine rank (floor 2.00 GiB), 5 buckets, 4.00 GiB across hosts, 1.00 GiB from the "
        "busiest sender, 1.5 s at plan.network_gib_per_second; without frozen weights"
    }
