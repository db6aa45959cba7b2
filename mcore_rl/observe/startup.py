"""What a run does before its first step, line by line with the time, so that nobody watches a silent terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class StartUp:
    """`say` prints a line with the seconds since the process of this run began its work."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._started = time.monotonic()

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self._started:5.1f} s] {line}", file=self._stream, flush=True)
