"""Recorder of timed spans in each process; the driver drains the recorders into the timeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mcore_rl.types import Span


class SpanRecorder:
    """Spans of one process; `process` is its name in the timeline, such as "trainer rank 3". Thread-safe."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.annotate: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Context manager by name that each span enters, such as RankProfile.annotate."""
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the time spent in the block, even if it raises."""
        # The Unix clock puts spans of different processes on one axis. Durations come from the monotonic clock, because
        # the Unix clock may be set back.
        start, steady = time.time(), time.perf_counter()
        try:
            with self.annotate(name):
                yield
        finally:
            self.record(name, start, start + time.perf_counter() - steady)

    def record(self, name: str, start: float, end: float) -> None:
        """Add a span that was timed elsewhere. Units: seconds of the Unix clock."""
        with self._lock:
            self._spans.append(Span(name, start, end, self.process))

    def drain(self) -> list[Span]:
        """Return all spans since the last drain, in the order of their ends."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans
