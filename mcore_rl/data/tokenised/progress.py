"""How far reading is, for files that take long: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

QUIET_SECONDS = 2.0
"""What is read within this time shows nothing."""
_SECONDS_BETWEEN_LINES = {True: 0.2, False: 30.0}
"""On a terminal, and elsewhere."""


class RowProgress:
    """Counts rows that have been tokenised; prints to `stream`, by default stderr, so that stdout stays for results."""

    def __init__(self, key: str, files: Sequence[Path], stream: TextIO | None = None) -> None:
        self._key, self._files, self._rows, self._file = key, files, 0, 0
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._started = time.monotonic()
        self._next_line = self._started + QUIET_SECONDS
        self._shown = False

    def advance(self, num_rows: int, file: int) -> None:
        """So many more rows are done, of the file with this index."""
        self._rows += num_rows
        self._file = file
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + _SECONDS_BETWEEN_LINES[self._live]
            line = self.line(now - self._started)
            self._stream.write(f"\r{line}\033[K" if self._live else f"{line}\n")
            self._stream.flush()
            self._shown = True

    def line(self, seconds: float) -> str:
        """What is shown after `seconds` of work."""
        of = f"file {self._file + 1} of {len(self._files)}, " if len(self._files) > 1 else ""
        speed = f"  {self._rows / seconds:,.0f} rows/s" if seconds > 0 else ""
        return f"{self._key}: {self._rows:,} rows tokenised ({of}{self._files[self._file]}){speed}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown and self._live:
            self._stream.write("\n")
            self._stream.flush()
