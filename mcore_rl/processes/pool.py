"""Calls to several child processes that answer with `served.answer`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil

from mcore_rl.errors import WorkerDiedError
from mcore_rl.processes.child import Child, kill_all, start_module
from mcore_rl.processes.exits import exit_text
from mcore_rl.processes.served import FAILED, REFUSED

_CHECK_SECONDS = 0.5
"""Interval of checks that the workers still run."""
_SECONDS_TO_EXIT = 5.0
"""Time to wait for the exit code of a process that has closed its connection."""

Answer = tuple[str, object]
"""Kind of an answer and its content (see served.answer)."""


class LostWorkerError(WorkerDiedError):
    """A worker has ended, did not answer in time, or failed in a call."""


class CallFailedError(LostWorkerError):
    """A call raised an unexpected error. `traceback` is the end of its traceback."""

    traceback = ""


@dataclass(frozen=True)
class Worker:
    """A process that answers one message at a time.

    name: begins error messages.
    child: None for a process that another host has started.
    """

    name: str
    connection: Connection
    child: Child | None = None

    def send(self, message: object) -> None:
        """Send a message. `results` reports a process that has ended."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def death(self, call: str) -> LostWorkerError:
        """Return the error for a process that has ended or closed its connection."""
        status = "" if self.child is None else f" with {exit_text(self.child.wait(_SECONDS_TO_EXIT))}"
        return LostWorkerError(f"{self.name} ended in `{call}`{status}")

    def state(self) -> str:
        """Return the state of a process that does not answer, as the predicate of an error message."""
        if self.child is None:
            return "is on another host"
        try:
            return f"is {psutil.Process(self.child.pid).status()}"
        except psutil.NoSuchProcess:
            return "has ended"


@contextlib.contextmanager
def started(module: str, name: str, num: int, environment: Mapping[str, str]) -> Iterator[list[Worker]]:
    """Start `num` workers that run `module` (child.start_module) and kill their process trees at the end."""
    workers: list[Worker] = []
    try:
        for _ in range(num):
            child, socket = start_module(module, environment)
            workers.append(Worker(name, Connection(socket.detach()), child))
        yield workers
    finally:
        # Before the connections close: a worker that reads their end exits, and leaves descendants without a parent.
        kill_all([worker.child for worker in workers if worker.child is not None])
        for worker in workers:
            worker.connection.close()


def map_in_order(workers: Sequence[Worker], messages: Iterable[object], call: str) -> Iterator[Any]:
    """Yield the result of every message, in the order of the messages. Reads at most one message per worker ahead.

    Raises: same as `results`.
    """
    number = -1
    for number, message in enumerate(messages):
        worker = workers[number % len(workers)]
        # A worker has one message at a time: while it sends a result it reads nothing, and both ends would block.
        if number >= len(workers):
            yield from results([worker], call)
        worker.send(message)
    for last in range(max(0, number + 1 - len(workers)), number + 1):
        yield from results([workers[last % len(workers)]], call)


def results(workers: Sequence[Worker], call: str, seconds: float = math.inf, key: str = "") -> list[object]:
    """Wait until every worker has answered its last message; return the results.

    call: name of the call in errors.
    seconds, key: the time limit for all answers, and its configuration key.

    Raises: the error of this project that a call raised; LostWorkerError.
    """
    deadline, answers = time.monotonic() + seconds, list[Answer]()
    for worker in workers:
        while not worker.connection.poll(min(_CHECK_SECONDS, max(0.0, deadline - time.monotonic()))):
            # A worker may wait in a collective for another one that has ended.
            ended = next((each for each in workers if each.child and each.child.exit_code is not None), None)
            if ended is not None and not worker.connection.poll():  # it may have answered just before
                _raise_loss(ended, workers, answers, call)
            if time.monotonic() > deadline:
                late = f"{worker.name} did not answer `{call}` within {seconds:g} s ({key})"
                raise LostWorkerError(f"{late}: it {worker.state()}")
        try:
            answers.append(worker.connection.recv())
        except (EOFError, OSError):
            _raise_loss(worker, workers, answers, call)
    _raise_errors(workers, answers, call)  # not earlier: an unread answer would be taken for the next call's
    return [result for _, result in answers]


def _raise_loss(lost: Worker, workers: Sequence[Worker], answers: Sequence[Answer], call: str) -> NoReturn:
    """Raise the cause of a loss: an error that a worker has reported, else the death of `lost`.

    If a signal ended the worker, or if it ran on another host, its death is the cause: collectives then fail in other
    workers because of it.
    """
    death = lost.death(call)
    if lost.child is not None and (lost.child.exit_code or 0) >= 0:
        _raise_errors(workers, answers, call)
    raise death from None


def _raise_errors(workers: Sequence[Worker], answers: Sequence[Answer], call: str) -> None:
    for worker, (kind, traceback) in zip(workers, answers, strict=False):
        if kind == FAILED:
            failure = CallFailedError(f"{worker.name} failed in `{call}`:\n{traceback}")
            failure.traceback = str(traceback)
            raise failure
    for kind, refusal in answers:
        if kind == REFUSED:
            assert isinstance(refusal, tuple)
            error, message = refusal
            raise error(message)
