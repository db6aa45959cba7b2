"""A weight sync from the GPU of a trainer rank to the GPU of an engine rank on the same host, through NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mcore_rl.weights.connection import Connection, TrainerSetup, connect_engine_rank
from mcore_rl.weights.receive import SliceReceiver
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.arrival import Rendezvous
from mcore_rl.weights.transports.hosts import this_host
from mcore_rl.weights.transports.link import open_store
from mcore_rl.weights.transports.nccl_group import nccl_version
from mcore_rl.weights.transports.segments import device_uuid
from mcore_rl.weights.transports.topology import Endpoint, Topology
from model_converters.mapping.layout import TrainLayout
from tests.distributed.launch import launch
from tests.gpu.ranks import TIMEOUT_SECONDS
from tests.tiny_models import tiny_fields
from tests.unit.weights.delivery import Taken, check_taken, trainer_tensors
from tests.unit.weights.test_slices import random_checkpoint

pytestmark = pytest.mark.gpus(2)

PLAN_FIELDS = tiny_fields("qwen3_moe", vocab_size=97)


def test_sync_between_two_gpus_of_a_host_delivers_every_byte(device: str) -> None:
    store = open_store("127.0.0.1")
    kinds = launch(sync, 2, store.port, timeout_seconds=TIMEOUT_SECONDS, device=device)
    assert kinds == ["network" if device == "cuda" else "shared_memory"] * 2


def sync(rank: int, port: int) -> str:
    """Run two updates from rank 0, a trainer rank, to rank 1, an engine. Returns the kind of the staging buffer."""
    endpoints: list[Endpoint] = [None, None]  # type: ignore[list-item]
    dist.all_gather_object(endpoints, Endpoint(this_host(), "127.0.0.1", device_uuid(), nccl_version()))
    topology = Topology((endpoints[0],), (endpoints[1],), 1)
    topology.check_versions()
    plan = SyncPlan(PLAN_FIELDS, torch.float32, TrainLayout(1), EngineLayout(), topology, 20_000, 2)
    setup = TrainerSetup(plan, 0) if rank == 0 else None
    segments = [setup.create_buffers() if setup else {}]
    dist.broadcast_object_list(segments)
    connection = Connection(plan, Rendezvous("127.0.0.1", port, 50), segments[0], 60.0)
    sender = setup.connect(connection) if setup else None
    receiver = None if setup else connect_engine_rank(connection, 0)
    dist.barrier()
    if setup:
        setup.unlink()
    for seed in range(2):
        checkpoint = random_checkpoint(plan.rows, seed)
        if sender is not None:
            held = trainer_tensors(plan.rows, plan.train_layout, 0, checkpoint)
            sender.send({name: tensor.to("cuda" if device_uuid() else "cpu") for name, tensor in held.items()})
        if receiver is not None:
            check_taken([receive(receiver)], checkpoint, PLAN_FIELDS, plan.engine_layout)
    if receiver is not None:
        receiver.close()
    dist.barrier()
    if setup:
        setup.close()
    return topology.buffers[0].kind


def receive(receiver: SliceReceiver) -> Taken:
    """Receive one update. Returns the boxes of each tensor."""
    taken: Taken = {}
    receiver.begin()
    for sync_round in range(receiver.num_rounds):
        receiver.receive(
            sync_round, lambda name, start, box: taken.setdefault(name, []).append((start, box.to("cpu", copy=True)))
        )
    receiver.finish()
    return taken
