"""Progress of reading large files: a line that changes on a terminal, a line every 30 seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

QUIET_SECONDS = 2.0
"""Reading that takes less time shows nothing."""
_TERMINAL_SECONDS, _LOG_SECONDS = 0.2, 30.0
"""Time between two updates."""


class RowProgress:
    """Counts tokenised rows and shows them on `stream`, by default stderr, because stdout is for results."""

    def __init__(self, key: str, files: Sequence[Path], stream: TextIO | None = None) -> None:
        from rich.console import Console

        self._key, self._files, self._rows = key, files, 0
        self._console = Console(file=stream or sys.stderr)
        self._status = self._console.status("")
        self._started = time.monotonic()
        self._next_update = self._started + QUIET_SECONDS

    def advance(self, num_rows: int, file: int) -> None:
        """Count `num_rows` more rows of the file with index `file`."""
        self._rows += num_rows
        now = time.monotonic()
        if now < self._next_update:
            return
        line = self._line(file, now - self._started)
        if self._console.is_terminal:
            self._status.update(line)
            self._status.start()
        else:
            print(line, file=self._console.file, flush=True)
        self._next_update = now + (_TERMINAL_SECONDS if self._console.is_terminal else _LOG_SECONDS)

    def _line(self, file: int, seconds: float) -> str:
        position = f"file {file + 1} of {len(self._files)}, " if len(self._files) > 1 else ""
        speed = f"{self._rows / seconds:,.0f} rows/s"
        return f"{self._key}: {self._rows:,} rows tokenised ({position}{self._files[file]})  {speed}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()
