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
    COMPLETED or FAILED."""

    def __init__(self, name: str, record: Record) -> None:
        self._name, self._record = name, record
        self._state, self._since = PENDING, time.time()

    def enter(self, state: str) -> None:
        """Enter a state; does nothing if it is the current one."""
        if state != self._state:
            now = time.time()
            self._record(f"{self._name} {self._state}", self._since, now)
            self._state, self._since = state, now


class EpisodeTraces:
    """Provides traces for up to MAX_TRACED episodes at a time. Not thread-safe: used on the episodes' thread only."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._traced: set[EpisodeTrace] = set()

    def begin(self, name: str) -> EpisodeTrace:
        """Return a trace; it records nothing while MAX_TRACED others do."""
        if len(self._traced) == MAX_TRACED:
            return EpisodeTrace(name, lambda *span: None)
        trace = EpisodeTrace(name, self._record)
        self._traced.add(trace)
        return trace

    def end(self, trace: EpisodeTrace, state: str) -> None:
        """End a trace; the final state appears as a span of zero length."""
        self._traced.discard(trace)
        trace.enter(state)
        # Leaving the final state records it.
        trace.enter("")
