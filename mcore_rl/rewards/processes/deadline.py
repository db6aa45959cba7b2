"""A time limit for a call in the main thread of a process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
REPEAT_SECONDS = 0.2
SIGNALS = {signal.ITIMER_REAL: signal.SIGALRM, signal.ITIMER_PROF: signal.SIGPROF}


class DeadlineExceeded(BaseException):
    """Interruption of a call. Not an Exception, so that a grader's `except Exception` does not catch it."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self.deadline = deadline


class Deadline:
    """Time limit of `seconds` for Python code. Deadlines with different timers can be nested.

    timer: signal.ITIMER_REAL, or signal.ITIMER_PROF for the CPU time of the whole process.

    It cannot interrupt code that does not return to the interpreter. Kill the process from outside instead.
    """

    def __init__(self, seconds: float, timer: int = signal.ITIMER_REAL) -> None:
        self.seconds = seconds
        self._timer = timer
        self._armed = False

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Return function(*args). Call it from the main thread.

        Raises: DeadlineExceeded.
        """
        # Install the handler for every call: some graders use SIGALRM too and do not restore the handler.
        signal.signal(SIGNALS[self._timer], self._interrupt)
        try:
            try:
                self._armed = True
                # Repeat the signal, because a bare `except:` may catch the first DeadlineExceeded.
                signal.setitimer(self._timer, self.seconds, REPEAT_SECONDS)
                return function(*args)
            finally:
                self._disarm()
        except DeadlineExceeded:
            self._disarm()  # the signal may have arrived in the first line of `finally`
            raise

    def _disarm(self) -> None:
        self._armed = False
        signal.setitimer(self._timer, 0.0)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._armed:
            raise DeadlineExceeded(self)
