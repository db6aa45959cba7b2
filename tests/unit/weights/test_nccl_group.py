"""The NCCL group of a weight sync leaves errors to its caller, ends for all members at a loss, and can be replaced."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.transports import nccl, nccl_group
from mcore_rl.weights.transports.arrival import Rendezvous, announce_loss, raise_announced
from mcore_rl.weights.transports.interface import Channels
from mcore_rl.weights.transports.link import MessageKind, MessageTag
from mcore_rl.weights.transports.nccl import NcclChannel
from mcore_rl.weights.transports.nccl_group import NcclGroup, process_group
from model_converters.mapping.layout import TrainLayout
from tests.tiny_models import tiny_fields
from tests.unit.weights import nccl_model
from tests.unit.weights.nccl_model import Gpus
from tests.unit.weights.test_transfer import check_update, checkpoint_of, held_by
from tests.unit.weights.transfer import SHORT_TIMEOUT_SECONDS, at_once, connected, store, sync_plan

CPU = torch.device("cpu")
TAG = MessageTag(MessageKind.WEIGHTS, 0, 0)
VARIABLES = ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


class Backend:
    """Stands for dist.ProcessGroupNCCL, which torch for CPUs lacks. Records its arguments and environment."""

    made: list[Backend]
    error: str = ""

    @staticmethod
    def Options() -> SimpleNamespace:
        return SimpleNamespace(_timeout=None, config=SimpleNamespace(min_ctas=None, max_ctas=None))

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.options = options
        self.environment = [os.environ.get(name) for name in VARIABLES]
        self.made.append(self)
        if self.error:
            raise RuntimeError(self.error)


class Group:
    """Stands for dist.ProcessGroup, which accepts backends of torch only."""

    BackendType = SimpleNamespace(NCCL="nccl")

    def __init__(self, *_: object) -> None:
        pass

    def _register_backend(self, *_: object) -> None:
        pass


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[Backend]:
    """Return all backends that are constructed."""
    monkeypatch.setattr(Backend, "made", [], raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    monkeypatch.setattr(dist, "ProcessGroup", Group)
    return Backend.made


def test_nccl_version_is_of_the_loaded_library_and_not_of_torchs_build(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, name: str, mode: int) -> None:
            assert mode & os.RTLD_NOLOAD

        def ncclGetVersion(self, pointer: Any) -> int:
            pointer._obj.value = 23007
            return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(nccl_group.ctypes, "CDLL", Library)
    assert nccl_group.nccl_version() == "2.30.7"
    monkeypatch.undo()
    assert nccl_group.nccl_version() == ""  # without a GPU


@pytest.mark.parametrize("error", ["", "no GPUs found"])
@pytest.mark.parametrize("before", [None, "3"])
def test_process_group_leaves_errors_to_the_wait(
    backends: list[Backend], monkeypatch: pytest.MonkeyPatch, before: str | None, error: str
) -> None:
    """torch's default ends the process of a trainer rank that waits for a dead engine."""
    monkeypatch.setattr(Backend, "error", error)
    for name in VARIABLES:
        monkeypatch.setenv(name, before) if before else monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=error) if error else nullcontext():
        process_group(dist.HashStore(), 0, 1, CPU, timedelta(seconds=7))
    (backend,) = backends
    assert backend.environment == ["1", "0"]
    assert [os.environ.get(name) for name in VARIABLES] == [before, before]
    assert backend.options._timeout == timedelta(seconds=70)
    assert (backend.options.config.min_ctas, backend.options.config.max_ctas) == (1, 4)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Replace NCCL by its model."""
    model = Gpus(4)
    monkeypatch.setattr(nccl_group, "process_group", lambda store, rank, *_: model.group(rank))
    monkeypatch.setattr(nccl, "this_gpu", lambda: CPU)
    monkeypatch.setattr(nccl_group, "SECONDS_BETWEEN_CHECKS", 0.05)
    return model


def channels(rendezvous: Rendezvous, members: list[int], timeout_seconds: float = 60.0) -> list[NcclChannel]:
    options: dict[str, Any] = {"timeout_seconds": timeout_seconds, "name": "member {}".format}
    return at_once([partial(NcclChannel.connect, rendezvous, each, members, **options) for each in members])


def lost(channel: NcclChannel, peer: int) -> str:
    """Receive from a silent peer. Returns the message of the error."""
    transfer = channel.receive(torch.zeros(3), peer, TAG)
    channel.launch()
    with pytest.raises(PeerLostError) as caught:
        transfer.wait()
    return str(caught.value)


def test_wait_without_answer_names_the_peer(gpus: Gpus) -> None:
    server = store()
    ours, _ = channels(Rendezvous("127.0.0.1", server.port, 1), [0, 5], timeout_seconds=0.2)
    assert lost(ours, 5) == "member 5: no answer through NCCL in 0.2 s"


def test_abandon_ends_the_waits_of_all_members(gpus: Gpus) -> None:
    server = store()
    first, second, third = channels(Rendezvous("127.0.0.1", server.port, 1), [0, 1, 2])
    calls = [partial(lost, first, 2), partial(lost, second, 2), partial(third.abandon, "member 7: closed")]
    messages = at_once(calls)[:2]  # the message of a timeout is another one
    assert messages == ["the weight sync has lost a process: member 7: closed"] * 2
    assert [group.aborts for group in gpus.groups if group.rank == 2] == [1]
    with pytest.raises(PeerLostError, match="must connect again"):
        lost(third, 0)


def test_announced_loss_ends_waits_of_its_generation(gpus: Gpus) -> None:
    server = store()
    ours = {number: channels(Rendezvous("127.0.0.1", server.port, number), [0, 1])[0] for number in (1, 2)}
    announce_loss(server, 2, "rollout engine 3 died")
    assert lost(ours[2], 1) == "the weight sync has lost a process: rollout engine 3 died"
    transfer = ours[1].send(torch.zeros(3), 1, TAG)
    raise_announced(ours[1]._group._store)
    assert transfer.work is None


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make NCCL wait forever where it connects members, as for one that died meanwhile."""
    released = threading.Event()
    monkeypatch.setattr(nccl_model.Group, "allreduce", lambda *_: released.wait())
    yield
    released.set()


@pytest.mark.usefixtures("hanging")
def test_member_lost_while_nccl_connects_ends_the_others(gpus: Gpus) -> None:
    server = store()
    rendezvous = Rendezvous("127.0.0.1", server.port, 1)
    reason = "rollout engine 3 died: killed by SIGKILL (host b)"
    threading.Timer(0.2, announce_loss, (server, 1, reason)).start()
    with pytest.raises(PeerLostError, match=re.escape(reason)):
        NcclGroup(rendezvous, 0, 2, CPU, timeout_seconds=300)
    with pytest.raises(PeerLostError, match=re.escape(reason)):  # also a member that arrives later
        NcclGroup(rendezvous, 1, 2, CPU, timeout_seconds=300)
    eventually(lambda: [group.aborts for group in gpus.groups] == [1, 1])


@pytest.mark.usefixtures("hanging")
def test_communicator_without_an_end_raises_after_the_timeout(gpus: Gpus) -> None:
    server = store()
    with pytest.raises(PeerLostError, match=r"the 2 GPUs .*: no connection through NCCL in 0\.2 s"):
        NcclGroup(Rendezvous("127.0.0.1", server.port, 1), 0, 2, CPU, timeout_seconds=0.2)


def test_member_lost_at_the_first_messages_ends_the_others(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects two GPUs inside the launch of their first messages."""
    server, released = store(), threading.Event()
    ours, _ = channels(Rendezvous("127.0.0.1", server.port, 1), [0, 1], timeout_seconds=300)
    monkeypatch.setattr(nccl_model.Group, "_end_coalescing", lambda *_: released.wait())
    threading.Timer(0.2, announce_loss, (server, 1, "rollout engine 0 died")).start()
    with pytest.raises(PeerLostError, match="rollout engine 0 died"):
        ours.handshake([1], [])
    eventually(lambda: [group.aborts for group in gpus.groups if group.rank == 0] == [1])
    released.set()


def test_first_calls_of_nccl_run_on_the_stream_of_the_caller(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has a current stream of its own, on which the memory to send would not be ready."""
    here, inside = threading.current_thread().name, list[tuple[str, str]]()

    @contextmanager
    def use(chosen: str) -> Iterator[None]:
        inside.append((chosen, threading.current_thread().name))
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {threading.current_thread().name}")
    monkeypatch.setattr(torch.cuda, "stream", use)
    server = store()
    (ours,) = channels(Rendezvous("127.0.0.1", server.port, 1), [0])
    ours._group._device = torch.device("cuda", 0)
    ours._group._bounded(lambda: None)
    assert inside == [(f"of {here}", "connect GPUs")]


def eventually(is_true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_true():
            return
        time.sleep(0.01)
    pytest.fail("it never became true")


def test_group_without_communicator_is_ended(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("unhandled system error")

    server = store()
    monkeypatch.setattr(nccl_model.Group, "allreduce", fail)
    with pytest.raises(PeerLostError, match="did not connect through NCCL: unhandled system error"):
        NcclGroup(Rendezvous("127.0.0.1", server.port, 1), 0, 1, CPU, timeout_seconds=5)
    assert [group.aborts for group in gpus.groups] == [1]


def test_handshake_with_silent_peer_ends_the_group(gpus: Gpus) -> None:
    """The kernel that waits for the peer would occupy the GPU until the process ends."""
    server, link = store(), cast(Any, SimpleNamespace(handshake=lambda peers: None, closing_on_loss=nullcontext))
    ours, _ = channels(Rendezvous("127.0.0.1", server.port, 1), [0, 1], timeout_seconds=0.2)
    with pytest.raises(PeerLostError, match="member 1: no answer"):
        Channels(link, ours).handshake([1], [], [1])
    assert [group.aborts for group in gpus.groups if group.rank == 0] == [1]


def test_all_members_get_a_new_group_after_a_loss(gpus: Gpus) -> None:
    experts = tiny_fields("qwen3_moe", vocab_size=97)
    plan, server = sync_plan(experts, TrainLayout(2, ep=2), EngineLayout(tp=2), "A0 A1", "B0 B1"), store()
    with connected(plan, server, 1, SHORT_TIMEOUT_SECONDS) as processes:
        check_update(processes, 0)
        held = held_by(plan, checkpoint_of(plan, 1))
        for sender, tensors in zip(processes.senders, held, strict=True):
            with pytest.raises(PeerLostError, match="rollout engine 0"):  # its ranks do not receive
                sender.send(tensors)
        assert [group.aborts for group in sorted(gpus.groups, key=lambda group: group.rank)] == [1, 1, 0, 0]
        for process in (*processes.senders, *processes.receivers):
            process.close()
        assert [group.aborts for group in gpus.groups] == [1] * 4
    gpus.reset()
    with connected(plan, server, 2) as processes:
        check_update(processes, 2)
    assert [group.aborts for group in gpus.groups] == [1] * 4 + [0] * 4


@pytest.mark.parametrize("members", [2, 5])
def test_handshake_pairs_every_message_in_batches(monkeypatch: pytest.MonkeyPatch, members: int) -> None:
    monkeypatch.setattr(nccl, "PEERS_AT_ONCE", 2)
    model = Gpus(members)
    monkeypatch.setattr(nccl_group, "process_group", lambda store, rank, *_: model.group(rank))
    monkeypatch.setattr(nccl, "this_gpu", lambda: CPU)
    server = store()
    made = channels(Rendezvous("127.0.0.1", server.port, 1), list(range(members)), timeout_seconds=20.0)
    # Everybody sends to all members with a larger number.
    at_once([partial(channel.handshake, range(each + 1, members), range(each)) for each, channel in enumerate(made)])
    assert 1 <= model.largest <= 4
    assert model.num_messages == members * (members - 1) // 2
