"""A grader with a time limit, whose errors become scores."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from traceback import StackSummary, TracebackException
from typing import TypeVar

from mcore_rl.config.functions import describe
from mcore_rl.rewards.functions import Grader, Sample
from mcore_rl.rewards.processes import deadline
from mcore_rl.rewards.processes.deadline import Deadline, DeadlineExceeded
from mcore_rl.rewards.results import failed
from mcore_rl.types import Score

T = TypeVar("T")
MAX_LINES = 40
"""Maximum length of a traceback."""
MAX_LINE_CHARS = 300
_CALLERS = (str(Path(deadline.__file__).parents[1]), str(Path(asyncio.__file__).parent))


@dataclass(frozen=True)
class GradingTask:
    """Samples that the grader receives in one call.

    keys: one per sample.
    pickled: the list of samples.
    alone: the process may not grade anything else at the same time.
    """

    keys: tuple[int, ...]
    pickled: bytes
    alone: bool = False

    @property
    def number(self) -> int:
        """Identifier of the task in answers."""
        return self.keys[0]


class EventLoop:
    """One event loop for all calls of a process: a module may keep objects of the loop, such as an HTTP session.

    Interrupting a call closes the loop and cancels everything that the call has started.
    """

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._cancelled: asyncio.CancelledError | None = None

    def run(self, awaitable: Awaitable[T]) -> T:
        """Wait for the result.

        Raises: errors of the awaitable; an interrupting exception, whose cause shows where the call was waiting.
        """
        if self._runner is None:
            self._runner = asyncio.Runner()
        self._cancelled = None
        try:
            return self._runner.run(self._result_of(awaitable))
        except Exception:
            raise
        except BaseException as interrupt:  # DeadlineExceeded, or SystemExit of the user's function
            runner, self._runner = self._runner, None
            runner.close()  # cancels pending tasks
            raise interrupt from self._cancelled

    async def _result_of(self, awaitable: Awaitable[T]) -> T:
        try:
            return await awaitable
        except asyncio.CancelledError as error:
            self._cancelled = error
            raise


class LimitedGrader:
    """A grader with a time limit of `seconds` per task.

    `grade` interrupts running code. `grade_concurrently` can interrupt a call only at an await.
    """

    def __init__(self, grader: Grader, seconds: float) -> None:
        self.loop = EventLoop()
        self._grader = grader
        self._deadline = Deadline(seconds)

    def grade(self, task: GradingTask) -> list[Score]:
        """Grade a task while no other task runs; after an error, return a failed score for every sample."""
        try:
            # Unpickling is limited too, because objects in extra_info may run the user's code.
            return self._deadline.call(lambda: self._grade(pickle.loads(task.pickled)))
        except BaseException as error:  # SystemExit of a grader must also fail its own sample only
            return self._failed(task, error, late=isinstance(error, DeadlineExceeded))

    async def grade_concurrently(self, task: GradingTask) -> list[Score]:
        """Grade a task while others run; after an error, return a failed score for every sample."""
        limit = asyncio.timeout(self._deadline.seconds)
        try:
            async with limit:
                # The deadline covers plain functions, which return without an await; asyncio.timeout covers the awaits.
                result = self._deadline.call(lambda: self._grader.grade(pickle.loads(task.pickled)))
                return await result if inspect.isawaitable(result) else result
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return self._failed(task, error.__cause__ or error, late=True)
            return self._failed(task, error, late=isinstance(error, DeadlineExceeded))

    def _grade(self, samples: Sequence[Sample]) -> list[Score]:
        result = self._grader.grade(samples)
        return self.loop.run(result) if inspect.isawaitable(result) else result

    def _failed(self, task: GradingTask, error: BaseException, *, late: bool) -> list[Score]:
        limit = f"reward.timeout_seconds={self._deadline.seconds:g}"
        cause = f"did not finish within {limit}" if late else f"raised {describe(error)}"
        return [failed(f"the grader {cause}", traceback_of(error))] * len(task.keys)


def traceback_of(error: BaseException) -> str:
    """Format a traceback as Python does; for a time limit, it shows where the function was interrupted."""
    if isinstance(error, DeadlineExceeded) and error.__cause__ is not None:
        error = error.__cause__  # where a coroutine was waiting (EventLoop)
        error.__context__ = None
    traceback = TracebackException.from_exception(error)
    frames = [frame for frame in traceback.stack if frame.filename != deadline.__file__]
    users = list(dropwhile(lambda frame: frame.filename.startswith(_CALLERS), frames))
    traceback.stack = StackSummary.from_list(users or frames)
    lines, half = "".join(traceback.format()).splitlines(), MAX_LINES // 2
    if len(lines) > MAX_LINES:
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} more lines ...", *lines[-half:]]
    return "\n".join(line[:MAX_LINE_CHARS] for line in lines)
