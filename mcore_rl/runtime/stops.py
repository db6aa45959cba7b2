"""What a signal to stop does. While a step is under way, the first INT or TERM lets it finish and be saved; before
that, and a second time, it ends the run at once. USR1 always waits for a step, and may come as often as it likes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

SECONDS_OF_ONE_STOP = 1.0
"""Signals this close to each other are one: `timeout` and `make` send TERM to a process and then to its whole group."""
SECONDS_TO_LEAVE_A_CALLBACK = 0.2


class Stops:
    """The requests to stop that a run has received, and where it stands when one arrives."""

    _step: int | None
    _asked_by: int | None
    _interrupted_by: int | None
    _to_raise: bool
    _was_swallowed: bool
    _last_seconds: float
    _what_follows: Callable[[], str] | None

    def __init__(self) -> None:
        self._forget()

    @contextlib.contextmanager
    def listening(self, what_follows: Callable[[], str] | None = None) -> Iterator[None]:
        """Handles the signals for the length of the block, which starts without any request. `what_follows` says how a
        run that was stopped can go on."""
        self._forget()
        self._what_follows = what_follows
        handlers = {signal.SIGINT: self.stop, signal.SIGTERM: self.stop, signal.SIGUSR1: self.request}
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        hook, sys.unraisablehook = sys.unraisablehook, self._after_swallowed(sys.unraisablehook)
        try:
            yield
        finally:
            sys.unraisablehook = hook
            for number, before in previous.items():
                signal.signal(number, before)

    def begin(self, step: int) -> None:
        """From here on a first signal waits until `step` is finished and saved."""
        self._step = step

    def requested(self) -> bool:
        """Whether the run is to save and stop at the end of its step; it stays so."""
        return self._asked_by is not None

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler of INT and TERM.

        Raises: KeyboardInterrupt where nothing is waited for.
        """
        if self._was_swallowed:
            self._was_swallowed = False
            raise KeyboardInterrupt(f"signal {self._interrupted_by}")
        now = time.monotonic()
        if now - self._last_seconds < SECONDS_OF_ONE_STOP:
            return
        self._last_seconds = now
        if self._interrupted_by is not None:
            os._exit(128 + number)  # what takes the run down is itself in the way; Ray's processes end with this one
        if self._step is not None and self._asked_by in (None, signal.SIGUSR1):
            self._asked_by = number
            _say(f"finishing step {self._step}, then saving; once more stops at once")
            return
        self.interrupt(number)

    def request(self, number: int, frame: FrameType | None) -> None:
        """Signal handler of USR1: the run saves a checkpoint at the end of its step, or of its first, and stops."""
        if self._asked_by is None:
            self._asked_by = number

    def interrupt(self, number: int) -> None:
        """Unwinds the run, like Ctrl-C. The exception may be raised inside a callback of Ray, which swallows it, so the
        next wait raises it once more (raise_swallowed).

        Raises: KeyboardInterrupt.
        """
        self._interrupted_by = number
        self._to_raise = True
        raise KeyboardInterrupt(f"signal {number}")

    def raise_swallowed(self) -> None:
        """Raises: KeyboardInterrupt, once after each interrupt."""
        if self._to_raise:
            self._to_raise = False
            raise KeyboardInterrupt(f"signal {self._interrupted_by}")

    def end(self) -> None:
        """The step under way cannot be finished: ends the run as a second INT or TERM would, if there was a first.

        Raises: KeyboardInterrupt.
        """
        if self._asked_by not in (None, signal.SIGUSR1):
            self.interrupt(self._asked_by)

    def give_up(self, reason: str) -> None:
        """Ends this process from any thread, as the main one will not come back: as stopped where an INT or TERM had
        come, else as failed for `reason`."""
        if self._interrupted_by is None and self._asked_by in (None, signal.SIGUSR1):
            _say(f"error: {reason}")
            os._exit(1)
        _say(f"stopped: {self._what_follows()}" if self._what_follows is not None else "stopped")
        os._exit(self.exit_code())

    def exit_code(self) -> int:
        """Of a run that was stopped: os.EX_TEMPFAIL (75) by USR1, as a shell would say (130, 143) by INT and TERM."""
        number = self._interrupted_by or self._asked_by or signal.SIGINT
        return os.EX_TEMPFAIL if number == signal.SIGUSR1 else 128 + number

    def _after_swallowed(
        self, hook: Callable[[sys.UnraisableHookArgs], object]
    ) -> Callable[[sys.UnraisableHookArgs], None]:
        """Return a hook for sys.unraisablehook that raises a swallowed KeyboardInterrupt of `interrupt` again.

        Python runs a signal handler wherever the main thread is. In a callback (a finalizer, a hook of os.fork, C code
        that calls Python) the exception cannot propagate: Python would print a traceback and continue.
        """

        def raise_again(unraisable: sys.UnraisableHookArgs) -> None:
            if self._interrupted_by is None or not issubclass(unraisable.exc_type, KeyboardInterrupt):
                hook(unraisable)
                return
            self._was_swallowed = True
            timer = threading.Timer(SECONDS_TO_LEAVE_A_CALLBACK, signal.raise_signal, (self._interrupted_by,))
            timer.daemon = True
            timer.start()

        return raise_again

    def _forget(self) -> None:
        self._step = self._asked_by = self._interrupted_by = None
        self._to_raise = self._was_swallowed = False
        self._last_seconds = -SECONDS_OF_ONE_STOP
        self._what_follows = None


def _say(line: str) -> None:
    # Not print: the signal may have come in the middle of one, and its lock is held.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{line}\n".encode())


STOPS = Stops()
"""Signals belong to the process, so there is one."""
