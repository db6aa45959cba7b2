"""Polls of `Watch.polling`: they begin remote calls, take results that are ready, and never wait."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayError

from mcore_rl.data.read_progress import Reading
from mcore_rl.ports import WorkBoard
from mcore_rl.runtime.calls import ProcessHandle, Ref
from mcore_rl.runtime.health import Starts, Watch
from mcore_rl.runtime.roles.base import RunProcess

SECONDS_PER_PROCESS = 0.05
"""Interval of a round of calls, per process: a call takes about 1 ms of the driver's time."""
SET_UP = "processes set up"

A = TypeVar("A")


class Answers(Generic[A]):
    """Last answers of processes to repeated calls, at most one pending call per process.

    processes: returns the processes to call now.
    begin: begins a call.
    """

    def __init__(
        self, processes: Callable[[], Sequence[ProcessHandle[Any]]], begin: Callable[[ProcessHandle[Any]], Ref[A]]
    ) -> None:
        self._processes, self._begin = processes, begin
        self._pending: dict[Ref[A], ProcessHandle[Any]] = {}
        self._answers: dict[ProcessHandle[Any], A] = {}
        self._next_round = 0.0

    def update(self) -> Mapping[ProcessHandle[Any], A]:
        """Take the answers that are there, begin the next calls if they are due, and return all last answers."""
        if self._pending:
            ended, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
            for call in ended:
                process = self._pending.pop(call)
                # The process is dead; the watch reports it.
                with contextlib.suppress(RayError):
                    self._answers[process] = ray.get(call)
        now = time.monotonic()
        if now >= self._next_round:
            processes, waiting = self._processes(), set(self._pending.values())
            self._pending |= {self._begin(process): process for process in processes if process not in waiting}
            self._next_round = now + SECONDS_PER_PROCESS * len(processes)
        return self._answers


@contextlib.contextmanager
def shown_reads(
    board: WorkBoard | None, watch: Watch, processes: Sequence[ProcessHandle[Any]] | None = None
) -> Iterator[None]:
    """Show the bytes that processes read during the block, by default all processes, summed over loads of one name."""
    if board is None:
        yield
        return
    answers = Answers[Reading | None](
        lambda: list(watch.processes.values()) if processes is None else processes,
        lambda process: process.call(RunProcess.reading),
    )
    # Loads of earlier blocks are not shown.
    begun: dict[ProcessHandle[Any], Reading | None] = {}
    shown: set[str] = set()

    def poll() -> None:
        done, total = Counter[str](), Counter[str]()
        for process, reading in answers.update().items():
            if reading is None or reading == begun.setdefault(process, reading if _is_over(reading) else None):
                continue
            done[reading.name] += reading.done
            total[reading.name] += reading.total
        for name in total:
            board.update(name, done[name], total[name], "bytes")
        shown.update(total)

    try:
        with watch.polling(poll):
            yield
    finally:
        for name in shown:
            board.end(name)


def _is_over(reading: Reading) -> bool:
    return reading.done >= reading.total


@contextlib.contextmanager
def shown_set_up(board: WorkBoard | None, watch: Watch) -> Iterator[Callable[[Starts], None]]:
    """Show the number of processes whose set-up has ended, of all processes of the run, and the weights that they read.
    Yields a function that adds set-ups."""
    starts: Starts = {}
    if board is None:
        yield starts.update
        return

    def poll() -> None:
        ended, _ = ray.wait(list(starts), num_returns=len(starts), timeout=0, fetch_local=False) if starts else ([], [])
        board.update(SET_UP, sum(len(starts[ref]) for ref in ended), len(watch.processes), "processes")

    try:
        with watch.polling(poll), shown_reads(board, watch):
            poll()
            yield starts.update
    finally:
        board.end(SET_UP)
