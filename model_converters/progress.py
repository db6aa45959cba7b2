"""Progress bar of conversions."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self, TextIO


class ByteProgress:
    """Progress bar in bytes on a terminal. Prints nothing if `stream`, by default stderr, is not a terminal.

    done_bytes: bytes that existed before the start; they do not count for the speed.
    """

    def __init__(self, verb: str, total_bytes: int, done_bytes: int = 0, stream: TextIO | None = None) -> None:
        # Imported here: conversions on a cluster seldom have a terminal.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = Console(file=stream or sys.stderr)
        size = (TaskProgressColumn(), DownloadColumn(binary_units=True))
        speed = (TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(
            TextColumn(verb), BarColumn(), *size, *speed, console=console, disable=not console.is_terminal
        )
        self._task = self._bar.add_task(verb, total=total_bytes, completed=done_bytes)

    def advance(self, num_bytes: int) -> None:
        self._bar.advance(self._task, num_bytes)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
