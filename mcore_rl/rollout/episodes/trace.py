"""States of episodes on the timeline: of a few at a time, since all of them would be too many to look at."""

from __future__ import annotations

import time
from collections.abc import Callable

PENDING, RUNNING, TOOL_CALLING, COMPLETED, FAILED = "PENDING", "RUNNING", "TOOL_CALLING", "COMPLETED", "FAILED"
AT_ONCE = 8
"""Episodes that are traced beside each other; the next one is when one of them has ended."""

Record = Callable[[str, float, float], None]
"""A span's name, and when it began and ended, in seconds of the Unix clock."""


class EpisodeTrace:
    """Of one episode, from its submission on: PENDING until the engine begins, then RUNNING or TOOL_CALLING, and at the
    end COMPLETED or FAILED."""

    def __init__(self, name: str, record: Record) -> None:
        self._name, self._record = name, record
        self._state, self._since = PENDING, time.time()

    def enter(self, state: str) -> None:
        """Nothing happens where that is its state."""
        if state != self._state:
            now = time.time()
            self._record(f"{self._name} {self._state}", self._since, now)
            self._state, self._since = state, now


class EpisodeTraces:
    """Hands out traces while fewer than AT_ONCE are under way; used by the thread of the episodes alone."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._free = AT_ONCE

    def begin(self, name: str) -> EpisodeTrace | None:
        """None: this one is not traced."""
        if not self._free:
            return None
        self._free -= 1
        return EpisodeTrace(name, self._record)

    def end(self, trace: EpisodeTrace | None, state: str) -> None:
        """The state that it ended in stands there as a moment."""
        if trace is None:
            return
        self._free += 1
        trace.enter(state)
        trace.enter("")
