"""A grader within its time limit: whatever it does becomes a score, unless it cannot be interrupted."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Sequence

from mcore_rl.config.functions import describe
from mcore_rl.rewards.functions import Grader, Sample
from mcore_rl.rewards.processes.deadline import Deadline, DeadlineExceeded
from mcore_rl.rewards.processes.event_loop import EventLoop
from mcore_rl.rewards.processes.messages import Task
from mcore_rl.rewards.processes.tracebacks import traceback_of
from mcore_rl.rewards.results import failed
from mcore_rl.types import Score


class Guarded:
    """seconds: for one task; in an alone call the limit interrupts code that computes too, beside others only what
    waits."""

    def __init__(self, grader: Grader, seconds: float) -> None:
        self.loop = EventLoop()
        self._grader = grader
        self._deadline = Deadline(seconds)

    def grade(self, task: Task) -> list[Score]:
        """Scores of a task, while nothing else is graded; of an error, as many of it."""
        try:
            return self._deadline.call(lambda: self._grade(pickle.loads(task.pickled)))
        except DeadlineExceeded as error:
            return self._late(task, error)
        except BaseException as error:  # a grader's SystemExit too costs its sample only
            return _raised(task, error)

    async def grade_beside_others(self, task: Task) -> list[Score]:
        """Scores of a task, whose grader may wait; of an error, as many of it."""
        try:
            async with asyncio.timeout(self._deadline.seconds) as limit:
                result = self._deadline.call(lambda: self._grader.grade(pickle.loads(task.pickled)))
                return await result if inspect.isawaitable(result) else result
        except DeadlineExceeded as error:
            return self._late(task, error)
        except TimeoutError as error:
            if limit.expired():
                return self._late(task, error.__cause__ or error)
            return _raised(task, error)
        except BaseException as error:  # a grader's SystemExit too costs its sample only
            return _raised(task, error)

    def _grade(self, samples: Sequence[Sample]) -> list[Score]:
        result = self._grader.grade(samples)
        return self.loop.run(result) if inspect.isawaitable(result) else result

    def _late(self, task: Task, error: BaseException) -> list[Score]:
        limit = f"reward.timeout_seconds={self._deadline.seconds:g}"
        return [failed(f"the grader did not finish within {limit}", traceback_of(error))] * len(task.keys)


def _raised(task: Task, error: BaseException) -> list[Score]:
    return [failed(f"the grader raised {describe(error)}", traceback_of(error))] * len(task.keys)
