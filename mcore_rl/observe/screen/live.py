"""The live screen: a thread that draws, and the decision between screen and lines."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from mcore_rl.config.schema import Config
from mcore_rl.errors import McoreRLError
from mcore_rl.observe.screen.board import Board
from mcore_rl.observe.screen.capture import CapturedOutput

if TYPE_CHECKING:
    from mcore_rl.observe.screen.drawing import Drawing

MIN_COLUMNS, MIN_ROWS = 70, 20
"""Smallest terminal that has a screen; a smaller one has lines."""
SECONDS_PER_FRAME = 0.25
PART_OF_TIME = 20
"""A thread that draws for t seconds then sleeps for at least PART_OF_TIME * t: it shares the interpreter with the
driver of the run."""
SECONDS_TO_END = 5.0
"""Time limit for the last frame: a slow file system blocks it, or a terminal that is stopped (Ctrl-S)."""
DUMB = ("", "dumb", "unknown")
"""Values of TERM whose terminals cannot move the cursor."""
Restoring = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Context in which the process calls a function before it ends without unwinding."""


def can_show(config: Config) -> bool:
    """Return whether stderr is a terminal that can show the screen, and the configuration allows it."""
    stream = sys.__stderr__
    # A test may have replaced sys.stderr; its lines would not be captured.
    if config.observe.plain or stream is None or stream is not sys.stderr or not stream.isatty():
        return False
    try:
        size = os.get_terminal_size(stream.fileno())
    except OSError:
        return False
    return os.environ.get("TERM", "") not in DUMB and size.columns >= MIN_COLUMNS and size.lines >= MIN_ROWS


@contextmanager
def live_screen(config: Config, restoring: Restoring) -> Iterator[Board | None]:
    """Show the run on stderr's terminal during the block; yields None where lines are printed instead.

    Everything that the process prints during the block is shown on the screen. After the block the terminal is as
    before, and the first and last printed lines follow.
    """
    if not can_show(config):
        yield None
        return
    # Imported late: rich and the parts of `watch` would delay messages about invalid input.
    from mcore_rl.observe.screen.drawing import Drawing

    assert sys.__stderr__ is not None
    terminal = sys.__stderr__.fileno()
    others = [each for each in (1, 2) if each != terminal and _is_same_terminal(each, terminal)]
    board, output = Board(), CapturedOutput([terminal, *others])
    screen: LiveScreen | None = None
    with restoring(output.abandon):
        try:
            screen = LiveScreen(Drawing(config, board, output), output)
            yield board
        finally:
            try:
                if screen is not None:
                    screen.stop()
            # Ctrl-C ends the wait only.
            finally:
                output.restore(is_drawn=screen is not None and screen.is_drawn)


class LiveScreen:
    """Thread that draws frames until `stop`. An error of the drawing ends the screen, never the run."""

    def __init__(self, drawing: Drawing, output: CapturedOutput) -> None:
        self._drawing, self._output, self._ended = drawing, output, threading.Event()
        self._thread = threading.Thread(target=self._run, name="live screen", daemon=True)
        self._thread.start()

    @property
    def is_drawn(self) -> bool:
        """Return whether the thread has not left the screen."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread, which leaves the screen, and wait for it for up to SECONDS_TO_END."""
        self._ended.set()
        self._thread.join(SECONDS_TO_END)

    def _run(self) -> None:
        try:
            with self._drawing:
                while not self._ended.is_set():
                    before = time.thread_time()
                    self._drawing.draw()
                    busy = time.thread_time() - before
                    self._ended.wait(max(SECONDS_PER_FRAME, PART_OF_TIME * busy))
        # The run directory was removed, or the terminal is gone.
        except (McoreRLError, OSError) as error:
            if not self._ended.is_set():
                print(f"warning: the live screen has ended: {error}", file=sys.stderr, flush=True)
        finally:
            # After an error the run continues without a screen, and prints lines.
            if not self._ended.is_set():
                self._output.restore(is_drawn=False)


def _is_same_terminal(descriptor: int, terminal: int) -> bool:
    # Not os.ttyname, which fails for terminals of another mount namespace.
    return os.isatty(descriptor) and os.fstat(descriptor).st_rdev == os.fstat(terminal).st_rdev
