"""Log of a run's start, with timestamps."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class StartUp:
    """Prints lines with the seconds since this object was created."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._started = time.monotonic()

    def show(self, line: str) -> None:
        print(f"[{time.monotonic() - self._started:5.1f} s] {line}", file=self._stream, flush=True)
