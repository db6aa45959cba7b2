"""Progress line of long conversions: bytes done, throughput and remaining time."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

_SECONDS_BETWEEN_LINES = 0.2


class ByteProgress:
    """Byte counter that shows a progress line if `stream` is a terminal and prints nothing otherwise.

    `done_bytes` were finished by an earlier call and are excluded from the throughput.
    """

    def __init__(self, verb: str, total_bytes: int, done_bytes: int = 0, stream: TextIO | None = None) -> None:
        self.verb, self.total_bytes, self.done_bytes = verb, total_bytes, done_bytes
        self._first_bytes = done_bytes
        self._stream = stream or sys.stderr
        self._started = time.monotonic()
        self._shown_at = 0.0

    def advance(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes
        if self._stream.isatty() and time.monotonic() - self._shown_at >= _SECONDS_BETWEEN_LINES:
            self._show()

    def line(self, seconds: float) -> str:
        """Format the progress line after `seconds` of work."""
        total = max(self.total_bytes, 1)
        speed = (self.done_bytes - self._first_bytes) / seconds if seconds > 0 else 0.0
        left = _duration((total - self.done_bytes) / speed) if speed > 0 else "?"
        return (
            f"{self.verb} {self.done_bytes / total:4.0%}  {self.done_bytes / 2**30:.2f} of {total / 2**30:.2f} GiB  "
            f"{speed / 1e9:.2f} GB/s  {left} left"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown_at:
            self._show()
            self._stream.write("\n")
            self._stream.flush()

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        self._stream.write(f"\r{self.line(self._shown_at - self._started)}\033[K")
        self._stream.flush()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
