"""NCCL groups of weight syncs, with one member: construction, messages, the end, and replacement.

They run in a child process: an error of NCCL would leave the GPU of this process unusable for other tests.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.transports.arrival import Rendezvous, announce_loss
from mcore_rl.weights.transports.link import MessageKind, MessageTag, open_store
from mcore_rl.weights.transports.nccl import NcclChannel
from mcore_rl.weights.transports.nccl_group import ENVIRONMENT, nccl_version

pytestmark = pytest.mark.cuda(only=True)

TAG = MessageTag(MessageKind.WEIGHTS, 0, 0)
SECONDS = 90
"""Timeout of each test: a child imports torch and creates a CUDA context."""
WATCHDOG = "pt_nccl_watchdg"
CYCLES_PER_SECOND = 2 * 10**9
"""Upper bound of a GPU's clock frequency."""


@pytest.fixture(scope="module")
def child() -> Iterator[Pool]:
    with get_context("spawn").Pool(1) as pool:  # ends the child even if it hangs
        yield pool


def test_group_moves_bytes_and_is_replaced_after_its_end(child: Pool) -> None:
    """The child makes all calls of a sync to a group, without a second process."""
    watchdogs, timeout, ctas, message = child.apply_async(construct_twice).get(SECONDS)
    # A watchdog thread of torch would end the process at the loss of a peer.
    assert watchdogs == [0, 0]
    assert (timeout, ctas) == (600.0, (1, 4))
    assert "must connect again" in message


def construct_twice() -> tuple[list[int], float, tuple[int, int], str]:
    store, watchdogs = open_store("127.0.0.1"), []
    environment = {name: os.environ.get(name) for name in ENVIRONMENT}
    for generation in (1, 2):
        channel = lone_member(store, generation)
        assert {name: os.environ.get(name) for name in ENVIRONMENT} == environment
        watchdogs.append(num_threads(WATCHDOG))
        for _ in range(2):
            check_transfer(channel)
        options = channel._group._group._get_backend(channel.device).options
        channel.abandon("the test ends it")
        channel.send(torch.zeros(3, device="cuda"), 0, TAG)
        message = lost(channel.launch)
        torch.cuda.synchronize()
    return watchdogs, options._timeout.total_seconds(), (options.config.min_ctas, options.config.max_ctas), message


@pytest.mark.parametrize(
    ("timeout_seconds", "announced", "expected"),
    [
        (0.5, "", "member 0: no answer through NCCL in 0.5 s"),
        (60.0, "it died", "the weight sync has lost a process: it died"),
    ],
)
def test_hanging_transfer_raises_and_the_process_goes_on(
    child: Pool, timeout_seconds: float, announced: str, expected: str
) -> None:
    message, seconds = child.apply_async(hang, (timeout_seconds, announced)).get(SECONDS)
    assert message == expected
    assert seconds < 3


def hang(timeout_seconds: float, announced: str) -> tuple[str, float]:
    """Wait for a transfer behind a kernel that runs for seconds, like one that waits for a lost peer. Then transfer
    bytes in a new group."""
    store = open_store("127.0.0.1")
    channel = lone_member(store, 1, timeout_seconds)
    torch.cuda._sleep(4 * CYCLES_PER_SECOND)
    channel.receive(torch.zeros(10**6, dtype=torch.uint8, device="cuda"), 0, TAG)
    transfer = channel.send(torch.ones(10**6, dtype=torch.uint8, device="cuda"), 0, TAG)
    channel.launch()
    if announced:
        threading.Timer(0.2, announce_loss, (store, 1, announced)).start()
    start = time.monotonic()
    message = lost(transfer.wait)
    seconds = time.monotonic() - start
    channel.abandon("after the test")
    torch.cuda.synchronize()
    check_transfer(lone_member(store, 2))
    return message, seconds


def test_nccl_refuses_two_processes_on_one_gpu() -> None:
    """Topology.gpu_buffers depends on it: such processes share memory instead."""
    store = open_store("127.0.0.1")
    with get_context("spawn").Pool(2) as pool:
        messages = pool.starmap_async(connect_two, [(store.port, member) for member in range(2)], 1).get(SECONDS)
    assert all("invalid usage" in each.lower() or "duplicate gpu" in each.lower() for each in messages), messages


def connect_two(port: int, member: int) -> str:
    def connect() -> None:
        NcclChannel.connect(
            Rendezvous("127.0.0.1", port, 1), member, [0, 1], timeout_seconds=60.0, name="member {}".format
        )

    return lost(connect)


def lone_member(store: dist.TCPStore, generation: int, timeout_seconds: float = 60.0) -> NcclChannel:
    assert nccl_version().startswith("2.")
    rendezvous = Rendezvous("127.0.0.1", store.port, generation)
    channel = NcclChannel.connect(rendezvous, 0, [0], timeout_seconds=timeout_seconds, name="member {}".format)
    channel.handshake([], [])
    return channel


def check_transfer(channel: NcclChannel) -> None:
    """Send bytes to this process itself, in one launch of several messages."""
    sent = [torch.randint(256, (size,), device="cuda").to(torch.uint8) for size in (1000, 10**6)]
    received = [torch.zeros_like(memory) for memory in sent]
    transfers = [channel.send(memory, 0, TAG) for memory in sent]
    transfers += [channel.receive(memory, 0, TAG) for memory in received]
    channel.launch()
    for transfer in transfers:
        transfer.wait()
    assert all(torch.equal(*pair) for pair in zip(received, sent, strict=True))


def lost(call: Callable[[], object]) -> str:
    """Return the message of the PeerLostError that `call` raises."""
    try:
        call()
    except PeerLostError as error:
        return str(error)
    return "no peer was lost"


def num_threads(name: str) -> int:
    comms = (task / "comm" for task in Path("/proc/self/task").iterdir())
    return sum(comm.read_text().strip() == name for comm in comms)
