"""Requests for stack dumps: by a signal to the driver, and by the watch when a process makes no progress."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_rl.errors import WorkerDiedError
from mcore_rl.processes.stack_requests import request_stacks
from mcore_rl.runtime import health, stack_dumps
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.roles import places
from mcore_rl.runtime.roles.places import Places
from mcore_rl.runtime.stack_dumps import StackRequests
from mcore_rl.weights.transports.hosts import Host, this_host
from tests.unit.runtime.fake_ray import Process, Ray

OTHER = Host("node7", ("another boot", 1))


class PlacedProcess(Process):
    """Process with a place, which records requests for stacks."""

    def __init__(self, ray: Ray, name: str, host: Host, pid: int) -> None:
        super().__init__(ray, name)
        self.place, self.requests = (host, pid), list[list[int]]()

    def where(self) -> object:
        return self.ended(self.place)

    def request_stacks(self, pids: Sequence[int]) -> object:
        self.requests.append(list(pids))
        return self.open_call() if self.is_stopped else self.ended(None)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Process ids of this host that were signalled."""
    found: list[int] = []
    monkeypatch.setattr(stack_dumps, "request_stacks", found.extend)
    return found


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    fake = Ray()
    for module in (health, places, stack_dumps):
        monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: fake.now))
    monkeypatch.setattr(stack_dumps, "time", SimpleNamespace(sleep=lambda seconds: None))
    return fake


def watch_of(processes: Sequence[PlacedProcess], logs: str | None = "logs") -> Watch:
    watch = Watch(timeout_seconds=20.0, places=Places(logs))
    for process in processes:
        watch.add(process)
    watch.places.ask(processes)
    return watch


def test_request_of_the_driver_reaches_each_host_once(ray: Ray, local: list[int], tmp_path: Path) -> None:
    here, first, second = (
        PlacedProcess(ray, name, host, pid)
        for name, host, pid in (("a", this_host(), 1), ("b", OTHER, 2), ("c", OTHER, 3))
    )
    watch = watch_of([here, first, second])
    with watch.stacks.listening(tmp_path):
        os.kill(os.getpid(), signal.SIGUSR2)
        watch.get([ray.call(5.0)])  # type: ignore[list-item]
    assert local == [1]
    assert (first.requests, second.requests) == ([[2, 3]], [])


def test_silent_process_is_dumped_by_another_of_its_host(ray: Ray, local: list[int]) -> None:
    silent, helper = PlacedProcess(ray, "rank 0", OTHER, 2), PlacedProcess(ray, "rank 1", OTHER, 3)
    watch = watch_of([silent, helper])

    def stop() -> None:
        silent.is_stopped = True

    ray.after(10.0, stop)
    with pytest.raises(
        WorkerDiedError, match=r"rank 0 did not answer for 20 s; stacks of all processes: logs/\*.stacks"
    ):
        watch.get([ray.call(1000.0)])  # type: ignore[list-item]
    assert (silent.requests, helper.requests) == ([], [[2, 3]])


def test_dead_process_causes_no_dump(ray: Ray, local: list[int]) -> None:
    process, other = PlacedProcess(ray, "rank 0", this_host(), 1), PlacedProcess(ray, "rank 1", this_host(), 2)
    watch = watch_of([process, other])
    ray.after(2.0, process.die)
    with pytest.raises(WorkerDiedError, match="rank 0 died"):
        watch.get([ray.call(1000.0)])  # type: ignore[list-item]
    assert local == []


def test_signal_to_the_driver_writes_its_stacks_and_is_taken_once(tmp_path: Path) -> None:
    requests, before = StackRequests(), signal.getsignal(signal.SIGUSR2)
    (tmp_path / "trainer_rank_0.stacks").touch()
    with requests.listening(tmp_path):
        # A handler in C may read the stacks of running threads, which can end the process.
        assert signal.getsignal(signal.SIGUSR2) == requests._request
        assert not requests.take()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert requests.take()
        assert not requests.take()
        assert "test_signal_to_the_driver" in (tmp_path / "driver.stacks").read_text()
    assert signal.getsignal(signal.SIGUSR2) == before
    assert [path.name for path in tmp_path.iterdir()] == ["driver.stacks"]


def test_request_stacks_leaves_processes_without_handler_alive() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        request_stacks([process.pid])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.terminate()
    request_stacks([process.pid])
