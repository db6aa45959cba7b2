"""NCCL groups of weight syncs, with one member: construction, messages, the end, and replacement."""

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
from mcore_rl.weights.transports.link import MessageKind, MessageTag, Rendezvous, open_store
from mcore_rl.weights.transports.nccl import NcclChannel
from mcore_rl.weights.transports.nccl_group import ENVIRONMENT, announce_loss

pytestmark = pytest.mark.cuda(only=True)

TAG = MessageTag(MessageKind.WEIGHTS, 0, 0)
CYCLES_PER_SECOND = 2 * 10**9
"""At most, of a GPU's clock."""


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
