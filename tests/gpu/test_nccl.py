"""NCCL groups of weight syncs: a group of one member as a sync constructs, ends and replaces it, and two GPUs."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.connection import Connection, TrainerSetup, connect_engine_rank
from mcore_rl.weights.receive import SliceReceiver
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.hosts import this_host
from mcore_rl.weights.transports.link import MessageKind, MessageTag, Rendezvous, open_store
from mcore_rl.weights.transports.nccl import NcclChannel
from mcore_rl.weights.transports.nccl_group import ENVIRONMENT, announce_loss, nccl_version
from mcore_rl.weights.transports.segments import device_uuid
from mcore_rl.weights.transports.topology import Endpoint, Topology
from model_converters.mapping.layout import TrainLayout
from tests.distributed.launch import launch
from tests.gpu.ranks import TIMEOUT_SECONDS
from tests.tiny_models import tiny_fields
from tests.unit.weights.delivery import Taken, check_taken, trainer_tensors
from tests.unit.weights.test_slices import random_checkpoint

TAG = MessageTag(MessageKind.WEIGHTS, 0, 0)
CYCLES_PER_SECOND = 2 * 10**9
"""At most, of a GPU's clock."""
PLAN_FIELDS = tiny_fields("qwen3_moe", vocab_size=97)


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return open_store("127.0.0.1")


def lone_member(store: dist.TCPStore, generation: int, timeout_seconds: float = 60.0) -> NcclChannel:
    rendezvous = Rendezvous("127.0.0.1", store.port, generation)
    channel = NcclChannel.connect(rendezvous, 0, [0], timeout_seconds=timeout_seconds, name="member {}".format)
    channel.handshake([], [])
    return channel


def check_transfer(channel: NcclChannel) -> None:
    """Send bytes to this process itself, in one launch of two messages."""
    sent = [torch.randint(256, (size,), device="cuda").to(torch.uint8) for size in (1000, 10**6)]
    received = [torch.zeros_like(memory) for memory in sent]
    transfers = [channel.send(memory, 0, TAG) for memory in sent]
    transfers += [channel.receive(memory, 0, TAG) for memory in received]
    channel.launch()
    for transfer in transfers:
        transfer.wait()
    assert all(torch.equal(*pair) for pair in zip(received, sent, strict=True))


def num_threads(name: str) -> int:
    comms = (task / "comm" for task in Path("/proc/self/task").iterdir())
    return sum(comm.read_text().strip() == name for comm in comms)


@pytest.mark.cuda(only=True)
def test_group_has_no_watchdog_and_is_replaced_after_its_end(store: dist.TCPStore) -> None:
    """A watchdog thread of torch's would end the process at the loss of a peer."""
    before, environment = num_threads("pt_nccl_watchdg"), {name: os.environ.get(name) for name in ENVIRONMENT}
    for generation in (1, 2):
        channel = lone_member(store, generation)
        assert {name: os.environ.get(name) for name in ENVIRONMENT} == environment
        assert num_threads("pt_nccl_watchdg") == before
        options = channel._group._group._get_backend(channel.device).options
        assert (options._timeout.total_seconds(), options.config.min_ctas, options.config.max_ctas) == (600, 1, 4)
        check_transfer(channel)
        check_transfer(channel)
        channel.abandon("the test ends it")
        channel.send(torch.zeros(3, device="cuda"), 0, TAG)
        with pytest.raises(PeerLostError, match="must connect again"):
            channel.launch()
        torch.cuda.synchronize()


@pytest.mark.cuda(only=True)
@pytest.mark.parametrize("end", ["timeout", "announcement"])
def test_transfer_that_hangs_raises_and_the_process_goes_on(store: dist.TCPStore, end: str) -> None:
    """A kernel that runs for seconds stands for a peer that does not answer."""
    generation = 3 if end == "timeout" else 4
    channel = lone_member(store, generation, timeout_seconds=0.5 if end == "timeout" else 60.0)
    torch.cuda._sleep(4 * CYCLES_PER_SECOND)
    channel.receive(torch.zeros(10**6, dtype=torch.uint8, device="cuda"), 0, TAG)
    transfer = channel.send(torch.ones(10**6, dtype=torch.uint8, device="cuda"), 0, TAG)
    channel.launch()
    messages = {"timeout": "member 0: no answer through NCCL in 0.5 s", "announcement": "has lost a process: it died"}
    if end == "announcement":
        threading.Timer(0.2, announce_loss, (store, generation, "it died")).start()
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=messages[end]):
        transfer.wait()
    assert time.monotonic() - start < 3
    channel.abandon("after the test")
    torch.cuda.synchronize()
    check_transfer(lone_member(store, generation + 10))


@pytest.mark.cuda(only=True)
def test_nccl_refuses_two_processes_on_one_gpu(store: dist.TCPStore) -> None:
    """Topology.gpu_buffers depends on it: such processes share memory instead."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        messages = list(pool.map(refusal, [store.port] * 2, range(2)))
    assert all("invalid usage" in each.lower() or "duplicate gpu" in each.lower() for each in messages), messages


def refusal(port: int, member: int) -> str:
    try:
        NcclChannel.connect(
            Rendezvous("127.0.0.1", port, 99), member, [0, 1], timeout_seconds=60.0, name="member {}".format
        )
    except PeerLostError as error:
        return str(error)
    return "NCCL connected them"


@pytest.mark.gpus(2)
def test_sync_between_two_gpus_of_a_host_delivers_every_byte(store: dist.TCPStore, device: str) -> None:
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
