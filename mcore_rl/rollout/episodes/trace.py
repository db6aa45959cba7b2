"""States of episodes on the timeline, for a few episodes at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

PENDING, RUNNING, TOOL_CALLING, COMPLETED, FAILED = "PENDING", "RUNNING", "TOOL_CALLING", "COMPLETED", "FAILED"
MAX_TRACED = 8
"""Maximum number of episodes that are traced at the same time; more would be unreadable."""

Record = Callable[[str, float, float], None]
"""Callback for a span: name, start and end in seconds of the Unix clock."""


class EpisodeTrace:
    """Trace of one episode from its submission: PENDING until the engine starts, then RUNNING or TOOL_CALLING, finally
    COMPLETED or FAILED. It records nothing while MAX_TRACED others do.

    traced: the traces that record, of all episodes. Only the episodes' thread creates and ends traces.
    """

    def __init__(self, name: str, record: Record, traced: set[EpisodeTrace]) -> None:
        self._name, self._record, self._traced = name, record, traced
        self._state, self._since = PENDING, time.time()
        if len(traced) < MAX_TRACED:
            traced.add(self)

    def enter(self, state: str) -> None:
        """Enter a state; does nothing if it is the current one."""
        if state != self._state:
            now = time.time()
            if self in self._traced:
                self._record(f"{self._name} {self._state}", self._since, now)
            self._state, self._since = state, now

    def end(self, state: str) -> None:
        """End the trace; the final state appears as a span of zero length."""
        self.enter(state)
        # Leaving the final state records it.
        self.enter("")
        self._traced.discard(self)
