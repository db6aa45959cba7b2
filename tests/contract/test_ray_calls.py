"""Calls through real Ray: those that one rank of a node passes on to its neighbours, and those that nobody answers."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError, McoreRLError, NonFiniteError, WorkerDiedError
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.health import Watch, kill_all
from mcore_rl.runtime.roles.base import RankGroup, RankMap, RankProcess
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.runtime.roles.places import Places
from mcore_rl.runtime.roles.trainer import TrainerProcess
from mcore_rl.weights.transports.hosts import this_host

NODES = (0, 1, 0, 2, 0)
"""Pretended, of five ranks: one node has three, in between others."""


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("a lock")


@ray.remote(concurrency_groups={"watch": 2, "pass_on": 1}, max_restarts=0)
@marks_errors
class Rank(RankProcess):
    def add(self, number: int, fetched: int) -> tuple[int, int, str]:
        return number + fetched, os.getpid(), threading.current_thread().name

    def meet(self, failing: bool) -> None:
        """As a collective of which one rank is missing."""
        if failing:
            raise NonFiniteError("loss is nan")
        threading.Event().wait(60)

    def die(self, how: str) -> None:
        if how == "exit":
            sys.exit(3)
        if how == "_exit":
            os._exit(4)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT}[how])
        threading.Event().wait(60)  # another thread may take the signal

    def fail(self, kind: str) -> None:
        if kind == "unpicklable":
            raise UnpicklableError
        raise {"disk": OSError(errno.ENOSPC, "full"), "bug": KeyError("weight")}[kind]


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    config = Config()
    config.cluster.device = "cpu"
    with ray_cluster(config, {"CPU": 5.0}) as [node]:
        daemons = psutil.Process().children(recursive=True)
        yield node
    psutil.wait_procs(daemons, timeout=60)  # they end with the process of a run, which is this one here


@pytest.fixture
def group(node: Any) -> Iterator[RankGroup]:
    handles = [Rank.options(num_cpus=1, scheduling_strategy=node).remote(f"rank {rank}") for rank in range(5)]
    watch = Watch(timeout_seconds=4.0)
    for rank, handle in enumerate(handles):
        watch.add(f"rank {rank}", handle)
    try:
        yield RankGroup(handles, NODES, RankMap((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)), watch)
    finally:
        kill_all(handles)


def test_ranks_have_the_niceness_of_the_run(group: RankGroup) -> None:
    """Ray's default of 15 leaves them next to nothing on a machine where anything else runs."""
    found = [psutil.Process(pid).nice() for _, pid in group.watch.get([h.where.remote() for h in group.handles])]
    assert found == [psutil.Process().nice()] * 5


def test_every_rank_gets_its_own_arguments_and_runs_them_in_its_main_thread(group: RankGroup) -> None:
    pids = [pid for _, pid in group.watch.get([handle.where.remote() for handle in group.handles])]
    threads = [thread for _, _, thread in group.watch.get([h.add.remote(0, 0) for h in group.handles])]
    for _ in range(2):  # the neighbours are known the second time
        hundreds = ray.put(100)
        found = group.on_every_rank("add", [(rank, hundreds) for rank in range(5)])
        assert found == [(100 + rank, pid, thread) for rank, pid, thread in zip(range(5), pids, threads, strict=True)]
    assert len(group.begin("add", [(0, 0)] * 5).references) == 3


@pytest.mark.parametrize("failing", [0, 4])
def test_what_a_rank_raises_arrives_while_its_neighbours_wait_for_it(group: RankGroup, failing: int) -> None:
    with pytest.raises(NonFiniteError, match=rf"^loss is nan \(rank {failing} on \S+\)$"):
        group.on_every_rank("meet", [(rank == failing,) for rank in range(5)])


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("disk", ConfigError, r"run\.dir: .*\(rank 1 on \S+\)$"),
        ("bug", WorkerDiedError, r"^rank 1 on \S+ failed: [\s\S]*KeyError: 'weight'"),
        ("unpicklable", WorkerDiedError, r"^rank 1 failed: [\s\S]*UnpicklableError"),  # by the call alone
    ],
)
def test_error_of_any_type_names_its_rank(group: RankGroup, kind: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        group.watch.get([group.handles[0].add.remote(0, 0), group.handles[1].fail.remote(kind)])


def test_error_of_a_trainer_rank_names_role_rank_and_host(node: Any) -> None:
    handle = TrainerProcess.options(num_cpus=0, scheduling_strategy=node).remote("trainer rank 3")
    watch = Watch()
    watch.add("trainer rank 3", handle)
    try:
        with pytest.raises(McoreRLError, match=rf"holds none \(trainer rank 3 on {this_host().name}\)$"):
            watch.get([handle.update.remote(7)])
    finally:
        kill_all([handle])


def test_the_death_of_a_rank_that_was_called_by_another_names_it(group: RankGroup) -> None:
    pids = [pid for _, pid in group.watch.get([handle.where.remote() for handle in group.handles])]
    calls = group.begin("meet", [(False,)] * 5)
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 2 died"):
        group.watch.get(calls.references)


def test_a_start_that_does_not_end_is_named_with_the_key(group: RankGroup) -> None:
    group.watch.start_seconds = 1.0
    first, second, *_ = group.handles
    with pytest.raises(WorkerDiedError, match=r"rank 1 did not start within 1 s \(cluster\.start_timeout_seconds\)"):
        group.watch.get_started({first.add.remote(0, 0): [first], second.meet.remote(False): [second]})


def test_a_start_does_not_wait_for_a_process_that_has_died_and_may_be_replaced(group: RankGroup) -> None:
    """The leader of an engine, for its rank on another host."""
    watch, (leader, follower, *_) = group.watch, group.handles
    watch.let_die([leader, follower])
    _, pid = watch.get([follower.where.remote()])[0]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 1 died"):
        watch.get_started({leader.meet.remote(False): [leader, follower]})
    assert "died" in (watch.lost(follower) or "")
    assert watch.lost(leader) is None


class Attendant:
    """Its calls are of processes that may die; what each said, or what became of it, by rank."""

    def __init__(self, watch: Watch, calls: dict[Any, tuple[int, Any]]) -> None:
        self.watch, self.under_way, self.found = watch, calls, dict[int, Any]()

    def calls(self) -> list[Any]:
        return list(self.under_way)

    def ended(self, calls: Sequence[Any]) -> None:
        for call in calls:
            rank, handle = self.under_way.pop(call)
            try:
                self.found[rank] = self.watch.value(call)[0]
            except WorkerDiedError:
                self.watch.blame_the_dead([handle])
                self.found[rank] = self.watch.lost(handle)


def test_calls_of_an_attendant_end_beside_others_and_each_of_its_dead_is_known(group: RankGroup) -> None:
    watch, handles = group.watch, group.handles
    watch.let_die(handles[:4])
    pids = [pid for _, pid in watch.get([handle.where.remote() for handle in handles])]
    calls = {handles[rank].meet.remote(False): (rank, handles[rank]) for rank in (3, 1, 2)}
    attendant = watch.attendant = Attendant(watch, {handles[0].add.remote(1, 2): (0, handles[0]), **calls})
    for rank in (1, 2, 3):
        os.kill(pids[rank], signal.SIGKILL)
    while attendant.under_way:  # the last rank is asked meanwhile, and answers
        assert watch.get([handles[4].add.remote(3, 4)])[0][0] == 7
    assert attendant.found[0] == 3
    for rank in (1, 2, 3):
        assert f"rank {rank} died" in (attendant.found[rank] or "")


DEATHS = {
    "kill": "killed by SIGKILL",
    "segv": "killed by SIGSEGV",
    "abort": "killed by SIGABRT",
    "_exit": "exit code 4",
    "exit": "exit code 3",
}


def test_death_of_a_rank_names_signal_or_exit_code_host_and_log(node: Any, tmp_path: Path) -> None:
    watch = Watch(places=Places(str(tmp_path)))
    # Each has the place of the one before, which has died.
    for how, status in DEATHS.items():
        name = f"trainer rank {how}"
        rank = Rank.options(num_cpus=0, scheduling_strategy=node).remote(name, str(tmp_path))  # type: ignore[attr-defined]
        watch.add(name, rank)
        watch.let_die([rank])
        watch.places.ask([rank])
        watch.get([rank.where.remote()])
        watch.places.update()  # as the next look of any wait does
        with pytest.raises(WorkerDiedError) as raised:
            watch.get([rank.die.remote(how)])
        expected = f"{name} died: {status} (host {this_host().name}, log {tmp_path}/trainer_rank_{how}.log)"
        assert watch.lost(rank) == expected or expected in str(raised.value), (watch.lost(rank), raised.value)


def test_a_stopped_rank_that_nobody_waits_for_is_named_in_time(group: RankGroup) -> None:
    """Also one that nobody has asked how it is since it started."""
    watch = group.watch
    watch.timeout_seconds, seconds = 1000.0, watch.timeout_seconds  # no questions
    pids = [pid for _, pid in watch.get([handle.where.remote() for handle in group.handles])]
    watch.get_started({handle.add.remote(0, 0): [handle] for handle in group.handles})
    watch.timeout_seconds = seconds
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerDiedError, match="rank 0 did not answer for 4 s"):
        group.on_every_rank("add", [(0, 0)] * 5)
