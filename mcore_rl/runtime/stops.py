"""Signals that stop a run. During a step, the first INT or TERM stops the run after the step has finished and a
checkpoint is written. Before the first step, or the second time, INT and TERM end the run at once. USR1 always waits
for the end of a step, however often it is sent."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

SECONDS_OF_ONE_STOP = 1.0
"""Signals within this time count as one: `timeout` and `make` send TERM to a process and then to its whole group."""
SECONDS_TO_LEAVE_A_CALLBACK = 0.2
"""Delay until an interrupt that was swallowed in a callback is raised again, when the callback has returned."""


@dataclass
class Stops:
    """Stop requests that a run has received, and the state that decides how to handle the next one."""

    _step: int | None = None
    _requested_by: int | None = None
    _interrupted_by: int | None = None
    _to_raise: bool = False
    _was_swallowed: bool = False
    _last_seconds: float = -SECONDS_OF_ONE_STOP
    _what_follows: Callable[[], str] | None = None
    _before_exit: Callable[[], None] | None = None

    @contextlib.contextmanager
    def listening(self, what_follows: Callable[[], str] | None = None) -> Iterator[None]:
        """Handle the signals in the block, which starts without requests. `what_follows` returns how to continue a
        stopped run."""
        vars(self).update(vars(Stops(_what_follows=what_follows)))
        handlers = {signal.SIGINT: self.stop, signal.SIGTERM: self.stop, signal.SIGUSR1: self.request}
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        # Python reports exceptions that cannot propagate to this hook.
        hook, sys.unraisablehook = sys.unraisablehook, self._after_swallowed(sys.unraisablehook)
        try:
            yield
        finally:
            sys.unraisablehook = hook
            for number, before in previous.items():
                signal.signal(number, before)

    @contextlib.contextmanager
    def restoring(self, restore: Callable[[], None]) -> Iterator[None]:
        """Call `restore` in the block before the process exits without unwinding: in a signal handler or any thread."""
        self._before_exit = restore
        try:
            yield
        finally:
            self._before_exit = None

    def begin(self, step: int) -> None:
        """Begin a step: from now on, a first signal waits until `step` is finished and saved."""
        self._step = step

    def requested(self) -> bool:
        """Return whether the run must save and stop at the end of its step."""
        return self._requested_by is not None

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler of INT and TERM.

        Raises: KeyboardInterrupt if the signal does not wait for a step.
        """
        # The timer of `raise_again` has sent this signal: only raise what the callback swallowed.
        if self._was_swallowed:
            self._was_swallowed = False
            raise KeyboardInterrupt(f"signal {self._interrupted_by}")
        now = time.monotonic()
        if now - self._last_seconds < SECONDS_OF_ONE_STOP:
            return
        self._last_seconds = now
        if self._interrupted_by is not None:
            self._exit(128 + number)  # the shutdown hangs; Ray's processes end with this one (PR_SET_PDEATHSIG)
        if self._step is not None and self._requested_by in (None, signal.SIGUSR1):
            self._requested_by = number
            _print(f"finishing step {self._step}, then saving; a second signal stops at once")
            return
        self.interrupt(number)

    def request(self, number: int, frame: FrameType | None) -> None:
        """Signal handler of USR1: the run saves a checkpoint at the end of the current (or the first) step, and
        stops."""
        if self._requested_by is None:
            self._requested_by = number

    def interrupt(self, number: int) -> None:
        """Unwind the run, like Ctrl-C. If a callback of Ray swallows the exception, the next wait raises it again
        (raise_swallowed).

        Raises: KeyboardInterrupt.
        """
        self._interrupted_by = number
        self._to_raise = True
        raise KeyboardInterrupt(f"signal {number}")

    def raise_swallowed(self) -> None:
        """Raise the exception of an interrupt that a callback may have swallowed. Raises: KeyboardInterrupt, once
        each."""
        if self._to_raise:
            self._to_raise = False
            raise KeyboardInterrupt(f"signal {self._interrupted_by}")

    def end(self) -> None:
        """Interrupt the run if an INT or TERM waits for the end of the step, because the step cannot be finished.

        Raises: KeyboardInterrupt.
        """
        if self._requested_by not in (None, signal.SIGUSR1):
            self.interrupt(self._requested_by)

    def give_up(self, reason: str) -> None:
        """Exit from any thread because the main thread is stuck: as a stopped run after an INT or TERM, else as a
        failed run with `reason`."""
        # Without a request to stop, the death of the cluster is a failure. After one, a scheduler may have killed the
        # daemons.
        if self._interrupted_by is None and self._requested_by in (None, signal.SIGUSR1):
            self._exit(1, f"error: {reason}")
        follows = f"stopped: {self._what_follows()}" if self._what_follows is not None else "stopped"
        self._exit(self.exit_code(), follows)

    def _exit(self, code: int, line: str | None = None) -> NoReturn:
        """Exit at once, after restoring the terminal and printing `line`."""
        if self._before_exit is not None:
            self._before_exit()
        if line is not None:
            _print(line)
        os._exit(code)

    def exit_code(self) -> int:
        """Exit code of a stopped run: os.EX_TEMPFAIL (75) after USR1; 130 or 143 after INT or TERM, as in a shell."""
        number = self._interrupted_by or self._requested_by or signal.SIGINT
        return os.EX_TEMPFAIL if number == signal.SIGUSR1 else 128 + number

    def _after_swallowed(
        self, hook: Callable[[sys.UnraisableHookArgs], object]
    ) -> Callable[[sys.UnraisableHookArgs], None]:
        """Return a hook for sys.unraisablehook that raises a swallowed KeyboardInterrupt of `interrupt` again.

        Python runs a signal handler between any two instructions of the main thread. In a callback (a finalizer, a hook
        of os.fork, C code that calls Python) the exception cannot propagate: Python prints a traceback and continues.
        """

        def raise_again(unraisable: sys.UnraisableHookArgs) -> None:
            if self._interrupted_by is None or not issubclass(unraisable.exc_type, KeyboardInterrupt):
                hook(unraisable)
                return
            self._was_swallowed = True
            # Not signal.raise_signal: a signal to the timer's thread would not end a wait of the main thread.
            main = threading.main_thread().ident
            timer = threading.Timer(SECONDS_TO_LEAVE_A_CALLBACK, signal.pthread_kill, (main, self._interrupted_by))
            timer.daemon = True
            timer.start()

        return raise_again


def _print(line: str) -> None:
    # Not print: the signal may have interrupted a print, which holds the lock.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{line}\n".encode())


STOPS = Stops()
"""The only instance, since signal handlers belong to the process."""
