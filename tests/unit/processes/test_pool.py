"""Calls to child processes: results, errors, deaths and time limits."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from mcore_rl.errors import DataError, WorkerDiedError
from mcore_rl.processes.pool import CallFailedError, Worker, map_in_order, results, started

MODULE = """
import os, subprocess, sys, time
from mcore_rl.errors import DataError
from mcore_rl.processes import served

def calculate(message):
    if message == "reject":
        raise DataError("a.jsonl, line 3")
    if message == "divide":
        return 1 / 0
    if message == "unpicklable":
        return lambda: 0
    if message == "exit":
        os._exit(3)
    if message == "kill":
        os.kill(os.getpid(), 9)
    if message == "sleep":
        time.sleep(1000)
    if message == "daemon":
        return subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True).pid
    return message * 2

served.run(lambda connection: served.serve_calls(connection, calculate))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "calculating.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "calculating"


def call(workers: list[Worker], *messages: object, seconds: float = 30.0) -> list[object]:
    for worker, message in zip(workers, messages, strict=True):
        worker.send(message)
    return results(workers, "calculate", seconds, "some.key")


def test_results_returns_values_and_raises_errors_of_calls(module: str) -> None:
    with started(module, "a worker", 2, {}) as workers:
        assert call(workers, 1, 2) == [2, 4]
        with pytest.raises(DataError, match=r"^a.jsonl, line 3$"):
            call(workers, "reject", 2)
        with pytest.raises(
            CallFailedError, match=r"a worker failed in `calculate`:\n(.|\n)*ZeroDivisionError"
        ) as caught:
            call(workers, "reject", "divide")
        assert caught.value.traceback.endswith("ZeroDivisionError: division by zero")
        with pytest.raises(CallFailedError, match="pickle"):
            call(workers, "unpicklable", 1)
        assert call(workers, 3, 4) == [6, 8]  # every answer of the failed calls has been read


def test_results_reports_death_and_time_limit(module: str) -> None:
    with started(module, "a worker", 2, {}) as workers:
        assert call(workers, 1, 2) == [2, 4]  # both have started
        with pytest.raises(WorkerDiedError, match=r"within 0.2 s \(some.key\): it is sleeping"):
            call(workers, "sleep", 1, seconds=0.2)
        workers[1].send("exit")
        # The first worker does not answer; the death of the second ends the wait.
        with pytest.raises(WorkerDiedError, match=r"ended in `calculate` with exit code 3$"):
            results(workers, "calculate")


@pytest.mark.parametrize(
    ("end", "error", "message"),
    [
        ("exit", CallFailedError, "ZeroDivisionError"),  # the exit may follow from the error
        ("kill", WorkerDiedError, r"ended in `calculate` with signal SIGKILL$"),  # collectives of others fail then
    ],
)
def test_results_with_error_and_death_raises_the_cause(
    end: str, error: type[Exception], message: str, module: str
) -> None:
    with started(module, "a worker", 2, {}) as workers, pytest.raises(error, match=message):
        call(workers, "divide", end)


def test_map_in_order_reads_one_message_per_worker_ahead(module: str) -> None:
    read: list[int] = []

    def messages() -> object:
        for number in range(7):
            read.append(number)
            yield number

    with started(module, "a worker", 2, {}) as workers:
        mapped = map_in_order(workers, messages(), "calculate")  # type: ignore[arg-type]
        assert next(mapped) == 0
        assert read == [0, 1, 2]
        assert list(mapped) == [2, 4, 6, 8, 10, 12]
        assert list(map_in_order(workers, [5], "calculate")) == [10]


def test_started_workers_end_with_their_trees(module: str) -> None:
    with started(module, "a worker", 1, {}) as workers:
        (daemon,) = call(workers, "daemon")
        assert psutil.pid_exists(int(str(daemon)))
    deadline = time.monotonic() + 60
    while psutil.pid_exists(int(str(daemon))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(int(str(daemon)))
    assert workers[0].child is not None
    assert not Path(f"/proc/{workers[0].child.pid}").exists()
