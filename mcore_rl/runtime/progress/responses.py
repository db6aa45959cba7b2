"""Number of finished responses of the tasks that a scheduler runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcore_rl.ports import WorkBoard
from mcore_rl.runtime.calls import ProcessHandle
from mcore_rl.runtime.engines.balance import TaskPiece
from mcore_rl.runtime.engines.fleet import Fleet
from mcore_rl.runtime.engines.process import EngineProcess
from mcore_rl.runtime.progress.polls import Answers
from mcore_rl.types import RolloutTask

TITLES = {"train": "finished responses", "val": "finished validation responses"}


@contextlib.contextmanager
def shown_responses(
    board: WorkBoard | None,
    fleet: Fleet,
    tasks: Sequence[RolloutTask],
    tickets: Sequence[int],
    pieces: Mapping[int, TaskPiece],
) -> Iterator[None]:
    """Show the finished responses of `tasks` during the block. `pieces` are the current pieces of all tasks, by number;
    `tickets` the tickets of `tasks`."""
    if board is None or not tasks:
        yield
        return
    title = TITLES.get(tasks[0].prompt_set, tasks[0].prompt_set)
    total, own = sum(task.num_responses for task in tasks), set(tickets)

    def processes() -> list[ProcessHandle[Any]]:
        # Replaced engines have other processes.
        return [engine.process for engine in fleet.serving]

    answers = Answers[dict[int, int]](processes, lambda process: process.call(EngineProcess.num_ended))

    def poll() -> None:
        running: dict[int, int] = {}
        for of_engine in answers.update().values():
            running |= of_engine
        done = sum(
            _num_finished(piece, running.get(number, 0)) for number, piece in pieces.items() if piece.task in own
        )
        board.update(title, done, total, "responses")

    board.update(title, 0, total, "responses")
    try:
        with fleet.watch.polling(poll):
            yield
    finally:
        board.end(title)


def _num_finished(piece: TaskPiece, num_ended: int) -> int:
    """Return the finished responses of a piece. `num_ended`: its engine's last answer, which may be older than the
    report of the finished piece."""
    return num_ended if piece.finished is None else piece.num_requests
