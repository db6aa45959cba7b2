"""A grader with a time limit, whose errors become scores."""

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


class LimitedGrader:
    """A grader with a time limit of `seconds` per task.

    `grade` interrupts running code. `grade_concurrently` can interrupt a call only at an await.
    """

    def __init__(self, grader: Grader, seconds: float) -> None:
        self.loop = EventLoop()
        self._grader = grader
        self._deadline = Deadline(seconds)

    def grade(self, task: Task) -> list[Score]:
        """Grade a task while no other task runs; after an error, return a failed score for every sample."""
        try:
            return self._deadline.call(lambda: self._grade(pickle.loads(task.pickled)))
        except DeadlineExceeded as error:
            return self._late(task, error)
        except BaseException as error:  # SystemExit of a grader must also fail its own sample only
            return _raised(task, error)

    async def grade_concurrently(self, task: Task) -> list[Score]:
        """Grade a task while others run; after an error, return a failed score for every sample."""
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
        except BaseException as error:  # SystemExit of a grader must also fail its own sample only
            return _raised(task, error)

    def _grade(self, samples: Sequence[Sample]) -> list[Score]:
        result = self._grader.grade(samples)
        return self.loop.run(result) if inspect.isawaitable(result) else result

    def _late(self, task: Task, error: BaseException) -> list[Score]:
        limit = f"reward.timeout_seconds={self._deadline.seconds:g}"
        return [failed(f"the grader did not finish within {limit}", traceback_of(error))] * len(task.keys)


def _raised(task: Task, error: BaseException) -> list[Score]:
    return [failed(f"the grader raised {describe(error)}", traceback_of(error))] * len(task.keys)
