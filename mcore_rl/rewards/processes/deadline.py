"""A time limit on a call in the main thread of a process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
REPEAT_SECONDS = 0.2
SIGNALS = {signal.ITIMER_REAL: signal.SIGALRM, signal.ITIMER_PROF: signal.SIGPROF}


class DeadlineExceeded(BaseException):
    """Not an Exception: a grader's `except Exception` must not swallow it."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self.deadline = deadline


class Deadline:
    """Interrupts Python code that runs longer than `seconds`; of two with different timers one can run in the other.

    timer: signal.ITIMER_REAL, or signal.ITIMER_PROF for the processor time of the whole process.

    Code that never returns to the interpreter is not interrupted; for that, end the process from outside.
    """

    def __init__(self, seconds: float, timer: int = signal.ITIMER_REAL) -> None:
        self.seconds = seconds
        self._timer = timer
        self._armed = False

    def call(self, function: Callable[..., T], *args: object) -> T:
        """function(*args). Call it from the main thread.

        Raises: DeadlineExceeded.
        """
        # Each time anew: graders use SIGALRM too, and do not all put back what they found.
        signal.signal(SIGNALS[self._timer], self._interrupt)
        try:
            try:
                self._armed = True
                # Again and again, in case that a bare `except:` swallows the first one.
                signal.setitimer(self._timer, self.seconds, REPEAT_SECONDS)
                return function(*args)
            finally:
                self._disarm()
        except DeadlineExceeded:
            self._disarm()  # it may have been raised in the first line of `finally`
            raise

    def _disarm(self) -> None:
        self._armed = False
        signal.setitimer(self._timer, 0.0)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._armed:
            raise DeadlineExceeded(self)
