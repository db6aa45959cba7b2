"""Redirection of this process's output while the screen uses the terminal.

All descriptors of the terminal are redirected, not only Python's streams: signal handlers and native code write to
them directly. They point to a file, not to a pipe, whose writers would wait while the terminal is stopped (Ctrl-S).
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST_LINES, LAST_LINES = 60, 60
"""Lines that are kept for the time after the screen: the start-up log, and the end."""
SHOW_CURSOR_AND_LEAVE = b"\x1b[?25h\x1b[?1049l"


@dataclass
class Lines:
    """Printed lines: the first and the last ones."""

    first: list[str] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    num_left_out: int = 0

    def add(self, line: str) -> None:
        if len(self.first) < FIRST_LINES:
            self.first.append(line)
            return
        self.num_left_out += len(self.last) == LAST_LINES
        self.last.append(line)

    def newest(self, count: int) -> list[str]:
        """Return up to `count` last lines."""
        return [*self.first[max(0, len(self.first) + len(self.last) - count) :], *self.last][-count:] if count else []

    def text(self) -> str:
        """Return the kept lines, each with a newline."""
        between = [f"[... {self.num_left_out} lines ...]"] if self.num_left_out else []
        return "".join(f"{line}\n" for line in (*self.first, *between, *self.last))


class CapturedOutput:
    """Redirects `descriptors`, which refer to the same terminal, from its creation until `restore`.

    terminal: descriptor for drawing.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.lines = Lines()
        self._rest = b""
        self._lock, self._restored = threading.Lock(), False
        self._file = os.memfd_create("output")
        self._position = 0
        self.terminal = os.dup(descriptors[0])
        _flush()
        self._saved = {descriptor: os.dup(descriptor) for descriptor in descriptors}
        for descriptor in descriptors:
            _point(descriptor, self._file)

    def update(self) -> None:
        """Read the output since the last call into `lines`."""
        while block := os.pread(self._file, 1 << 16, self._position):
            self._position += len(block)
            *complete, self._rest = (self._rest + block).split(b"\n")
            for line in complete:
                self.lines.add(line.decode("utf-8", "backslashreplace"))

    def restore(self, *, is_drawn: bool) -> None:
        """End the redirection, and print the kept lines to the terminal; does nothing a second time. `is_drawn`: leave
        the screen first, because the thread that draws has not left it."""
        with self._lock:
            is_first, self._restored = not self._restored, True
        if not is_first:
            return
        _flush()
        self._point_back()
        self.update()
        text = self.lines.text().encode("utf-8", "backslashreplace") + self._rest
        terminal = next(iter(self._saved))
        _write(terminal, (SHOW_CURSOR_AND_LEAVE if is_drawn else b"") + text)
        if is_drawn:
            # Later frames of the thread are lost.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.terminal, inheritable=False)
        # A thread that still draws uses the other descriptors.
        for descriptor in (*self._saved.values(), *(() if is_drawn else (self.terminal, self._file))):
            os.close(descriptor)

    def abandon(self) -> None:
        """Restore the terminal in a signal handler, or in any thread, before the process ends: takes no locks, and
        prints the output that was not read yet."""
        if self._restored:
            return
        _write(self.terminal, SHOW_CURSOR_AND_LEAVE)
        self._point_back()
        _write(self.terminal, os.pread(self._file, 1 << 16, self._position))

    def _point_back(self) -> None:
        for descriptor, saved in self._saved.items():
            _point(descriptor, saved)


def _point(descriptor: int, target: int) -> None:
    """Make `descriptor` refer to the file of `target`. Child processes inherit it if they did before."""
    os.dup2(target, descriptor, inheritable=os.get_inheritable(descriptor))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _write(descriptor: int, content: bytes) -> None:
    """Write everything; nothing if the terminal is gone."""
    try:
        while content:
            content = content[os.write(descriptor, content) :]
    except OSError:
        return
