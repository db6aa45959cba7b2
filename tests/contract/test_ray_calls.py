"""Remote calls through real Ray: calls that a rank passes on to its neighbours, errors, deaths and timeouts."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated.gcs_service_pb2 import GetTaskEventsRequest
from ray.core.generated.gcs_service_pb2_grpc import TaskInfoGcsServiceStub

from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError, McoreRLError, NonFiniteError, WorkerDiedError
from mcore_rl.runtime.calls import FanOut, ProcessHandle, packed, remote_method
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.roles.base import RankProcess
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.runtime.roles.places import Places, kill_all
from mcore_rl.runtime.roles.trainer import TrainerActor
from mcore_rl.weights.transports.hosts import this_host

NODES = (0, 1, 0, 2, 0)
"""Simulated nodes of five ranks. Node 0 has three ranks, which are not consecutive."""


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("a lock")


@marks_errors
class Rank(RankProcess):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ends: dict[int, threading.Event] = defaultdict(threading.Event)

    def add(self, number: int, fetched: int) -> tuple[int, int, str]:
        return number + fetched, os.getpid(), threading.current_thread().name

    @remote_method(concurrency_group="watch")
    @packed
    def scale(self, column: np.ndarray, factor: float) -> np.ndarray:
        if not factor:
            raise NonFiniteError("factor is 0")
        return column * factor

    def meet(self, failing: bool, meeting: int = 0) -> None:
        """Block like a collective with a missing rank, until `release` of the same meeting."""
        if failing:
            raise NonFiniteError("loss is nan")
        self.ends[meeting].wait(60)

    @remote_method(concurrency_group="watch")
    def release(self, meeting: int) -> None:
        self.ends[meeting].set()

    def die(self, how: str) -> None:
        if how == "exit":
            sys.exit(3)
        if how == "_exit":
            os._exit(4)
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self, kind: str) -> None:
        if kind == "unpicklable":
            raise UnpicklableError
        raise {"disk": OSError(errno.ENOSPC, "full"), "bug": KeyError("weight")}[kind]


RankActor = ray.remote(concurrency_groups={"watch": 2, "pass_on": 1}, max_restarts=0)(Rank)


@dataclass
class Group:
    """Ranks, and calls to one or all of them."""

    ranks: list[ProcessHandle[Any]]
    watch: Watch

    def __post_init__(self) -> None:
        self.handles = [rank.actor for rank in self.ranks]
        self.calls = FanOut(self.ranks, NODES[: len(self.ranks)], self.watch)


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    config = Config()
    config.cluster.device = "cpu"
    # Helpers of multiprocessing from earlier modules stay until this process ends, so they are not waited for.
    before = psutil.Process().children(recursive=True)
    with ray_cluster(config.cluster, {"CPU": 10.0}) as [node]:
        daemons = set(psutil.Process().children(recursive=True)) - set(before)
        yield node
    psutil.wait_procs(daemons, timeout=60)


@contextmanager
def started(node: Any, num_ranks: int, timeout_seconds: float = 4.0) -> Iterator[Group]:
    ranks = [start(RankActor, node, 1, f"rank {rank}") for rank in range(num_ranks)]
    watch = Watch(timeout_seconds=timeout_seconds)
    for rank in ranks:
        watch.add(rank)
    try:
        yield Group(ranks, watch)
    finally:
        kill_all(ranks)


@pytest.fixture(scope="module")
def living(node: Any) -> Iterator[Group]:
    """Ranks for tests that leave them as they were."""
    with started(node, len(NODES), timeout_seconds=60) as group:  # on a busy machine, processes start slowly
        yield group


@pytest.fixture
def group(node: Any, request: pytest.FixtureRequest) -> Iterator[Group]:
    """Ranks that the test may kill. Their number is the parameter; default: one per entry of NODES."""
    with started(node, getattr(request, "param", len(NODES))) as group:
        yield group


with_two_ranks = pytest.mark.parametrize("group", [2], indirect=True)


def start(actor: Any, node: Any, num_cpus: int, name: str, *arguments: str) -> ProcessHandle[Any]:
    return ProcessHandle(name, actor.options(num_cpus=num_cpus, scheduling_strategy=node).remote(name, *arguments))


def test_ranks_have_niceness_of_driver(living: Group) -> None:
    """With Ray's default of 15 they get almost no CPU time if anything else runs."""
    found = [psutil.Process(pid).nice() for _, pid in living.watch.get([h.where.remote() for h in living.handles])]
    assert found == [psutil.Process().nice()] * 5


def test_on_every_rank_passes_own_arguments_and_uses_main_thread(living: Group) -> None:
    pids = [pid for _, pid in living.watch.get([handle.where.remote() for handle in living.handles])]
    threads = [thread for _, _, thread in living.watch.get([h.add.remote(0, 0) for h in living.handles])]
    for _ in range(2):  # the second time the ranks know their neighbours
        hundreds = ray.put(100)
        found = living.calls.call_each(Rank.add, [(rank, hundreds) for rank in range(5)]).results()
        assert found == [(100 + rank, pid, thread) for rank, pid, thread in zip(range(5), pids, threads, strict=True)]
    assert len(living.calls.call(Rank.add, 0, 0).references) == 3


def test_packed_calls_return_values_and_named_errors(living: Group) -> None:
    column = np.arange(3, dtype=np.float32)
    calls = [rank.call(Rank.scale, column, factor) for rank, factor in zip(living.ranks, (1.0, 2.0), strict=False)]
    for factor, found in zip((1.0, 2.0), living.watch.get(calls), strict=True):
        assert found.dtype == np.float32
        assert np.array_equal(found, column * factor)
    with pytest.raises(NonFiniteError, match=r"^factor is 0 \(rank 3 on \S+\)$"):
        living.watch.get([living.ranks[3].call(Rank.scale, column, 0.0)])


def test_control_service_gets_no_record_of_calls(living: Group) -> None:
    """The driver and the ranks would send one per call and second; the ranks have started more than a second ago."""
    living.calls.call(Rank.add, 1, 1).results()
    channel = init_grpc_channel(ray.get_runtime_context().gcs_address)
    reply = TaskInfoGcsServiceStub(channel).GetTaskEvents(GetTaskEventsRequest(), timeout=20)
    assert len(reply.events_by_task) == 0


@pytest.mark.parametrize("failing", [0, 4])
def test_on_every_rank_error_arrives_while_neighbours_wait(living: Group, failing: int) -> None:
    with pytest.raises(NonFiniteError, match=rf"^loss is nan \(rank {failing} on \S+\)$"):
        living.calls.call_each(Rank.meet, [(rank == failing, failing) for rank in range(5)]).results()
    living.watch.get([handle.release.remote(failing) for handle in living.handles])
    living.watch.get([handle.add.remote(0, 0) for handle in living.handles])  # all waits have ended


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("disk", ConfigError, r"run\.dir: .*\(rank 1 on \S+\)$"),
        ("bug", WorkerDiedError, r"^rank 1 on \S+ failed: [\s\S]*KeyError: 'weight'"),
        ("unpicklable", WorkerDiedError, r"^rank 1 failed: [\s\S]*UnpicklableError"),  # only the call names the rank
    ],
)
def test_watch_error_of_any_type_names_rank(living: Group, kind: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        living.watch.get([living.handles[0].add.remote(0, 0), living.handles[1].fail.remote(kind)])


def test_trainer_rank_error_names_role_rank_and_host(node: Any) -> None:
    rank = start(TrainerActor, node, 0, "trainer rank 3")
    watch = Watch()
    watch.add(rank)
    try:
        with pytest.raises(McoreRLError, match=rf"holds none \(trainer rank 3 on {this_host().name}\)$"):
            watch.get([rank.actor.update.remote(7, None)])
    finally:
        kill_all([rank])


@pytest.mark.parametrize("group", [3], indirect=True)
def test_watch_death_of_rank_called_by_neighbour_is_named(group: Group) -> None:
    pids = [pid for _, pid in group.watch.get([handle.where.remote() for handle in group.handles])]
    calls = group.calls.call(Rank.meet, False)
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 2 died"):
        group.watch.get(calls.references)


@with_two_ranks
def test_get_started_timeout_names_rank_and_key(group: Group) -> None:
    group.watch.start_seconds = 1.0
    (first, second), ranks = group.handles, group.ranks
    with pytest.raises(WorkerDiedError, match=r"rank 1 did not start within 1 s \(cluster\.start_timeout_seconds\)"):
        group.watch.get_started({first.add.remote(0, 0): [ranks[0]], second.meet.remote(False): [ranks[1]]})


@with_two_ranks
def test_get_started_dead_replaceable_process_raises_at_once(group: Group) -> None:
    """Example: the first host of an engine waits for a rank on another host that has died."""
    watch, (leader, follower) = group.watch, group.ranks
    watch.allow_failure([leader, follower])
    _, pid = watch.get([follower.actor.where.remote()])[0]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 1 died"):
        watch.get_started({leader.actor.meet.remote(False): [leader, follower]})
    assert "died" in (watch.lost.get(follower) or "")
    assert watch.lost.get(leader) is None


class Attendant:
    """Waits for calls to processes that may die. `found`: result or reason of the death, by rank."""

    def __init__(self, watch: Watch, calls: dict[Any, tuple[int, Any]]) -> None:
        self.watch, self.under_way, self.found = watch, calls, dict[int, Any]()

    def calls(self) -> list[Any]:
        return list(self.under_way)

    def ended(self, calls: Sequence[Any]) -> None:
        for call in calls:
            rank, process = self.under_way.pop(call)
            try:
                self.found[rank] = self.watch.value(call)[0]
            except WorkerDiedError:
                self.watch.blame_the_dead([process])
                self.found[rank] = self.watch.lost.get(process)


def test_attendant_calls_end_during_waits_and_deaths_are_known(group: Group) -> None:
    watch, handles, ranks = group.watch, group.handles, group.ranks
    watch.allow_failure(ranks[:4])
    pids = [pid for _, pid in watch.get([handle.where.remote() for handle in handles])]
    calls = {handles[rank].meet.remote(False): (rank, ranks[rank]) for rank in (3, 1, 2)}
    attendant = watch.attendant = Attendant(watch, {handles[0].add.remote(1, 2): (0, ranks[0]), **calls})
    for rank in (1, 2, 3):
        os.kill(pids[rank], signal.SIGKILL)
    while attendant.under_way:  # meanwhile the last rank answers a call
        assert watch.get([handles[4].add.remote(3, 4)])[0][0] == 7
    assert attendant.found[0] == 3
    for rank in (1, 2, 3):
        assert f"rank {rank} died" in (attendant.found[rank] or "")


DEATHS = {
    "kill": "killed by SIGKILL",
    "_exit": "exit code 4",
    "exit": "exit code 3",
}


def test_watch_death_names_status_host_and_log(node: Any, tmp_path: Path) -> None:
    watch = Watch(places=Places(str(tmp_path)))
    # Each rank takes the resources of the previous one, which has died.
    for how, status in DEATHS.items():
        name = f"trainer rank {how}"
        rank = start(RankActor, node, 0, name, str(tmp_path))
        watch.add(rank)
        watch.allow_failure([rank])
        watch.places.ask([rank])
        watch.get([rank.actor.where.remote()])
        watch.places.update()  # any later wait does the same
        with pytest.raises(WorkerDiedError) as raised:
            watch.get([rank.actor.die.remote(how)])
        expected = f"{name} died: {status} (host {this_host().name}, log {tmp_path}/trainer_rank_{how}.log)"
        assert watch.lost.get(rank) == expected or expected in str(raised.value), (watch.lost.get(rank), raised.value)


@with_two_ranks
def test_watch_stopped_rank_without_calls_is_named_in_time(group: Group) -> None:
    """Includes a rank whose liveness was not checked since its start."""
    watch = group.watch
    watch.timeout_seconds, seconds = 1000.0, watch.timeout_seconds  # no liveness checks
    pids = [pid for _, pid in watch.get([handle.where.remote() for handle in group.handles])]
    watch.get_started({rank.actor.add.remote(0, 0): [rank] for rank in group.ranks})
    watch.timeout_seconds = seconds
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerDiedError, match="rank 0 did not answer for 4 s"):
        group.calls.call(Rank.add, 0, 0).results()


def test_watch_stopped_start_dumps_the_stacks_of_a_blocked_rank(node: Any, tmp_path: Path) -> None:
    rank = start(RankActor, node, 0, "trainer rank 0", str(tmp_path))
    watch = Watch(places=Places(str(tmp_path)), start_seconds=1.0)
    watch.add(rank)
    watch.places.ask([rank])
    watch.get([rank.actor.where.remote()])
    try:
        blocked = rank.actor.meet.remote(False)
        with pytest.raises(WorkerDiedError, match=rf"stacks of all processes: {tmp_path}/\*\.stacks"):
            watch.get_started({blocked: [rank]})
        # The function in which the rank waits.
        assert "in meet" in (tmp_path / "trainer_rank_0.stacks").read_text()
    finally:
        kill_all([rank])
