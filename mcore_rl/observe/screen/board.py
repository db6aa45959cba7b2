"""Work in progress: stages of the run, and counted parts of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Work:
    """A stage of the run, or work of which the finished part is known.

    since: begin, by time.monotonic().
    total: in `unit`; None: only the elapsed time is known.
    """

    name: str
    since: float
    done: float = 0.0
    total: float | None = None
    unit: str = ""

    def seconds(self, now: float) -> float:
        """Return the time since the begin."""
        return max(now - self.since, 0.0)

    def seconds_left(self, now: float) -> float | None:
        """Estimate the remaining time from the mean speed so far; None while nothing is finished."""
        if self.total is None or self.done <= 0:
            return None
        return max(self.total - self.done, 0.0) * self.seconds(now) / self.done


class Board:
    """Current stages and counted work of the driver; implements ports.WorkBoard. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: list[Work] = []
        self._counted: dict[str, Work] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show `name` during the block. Stages may be nested."""
        work = Work(name, time.monotonic())
        with self._lock:
            self._stages.append(work)
        try:
            yield
        finally:
            with self._lock:
                # By identity: equal stages may overlap.
                self._stages = [other for other in self._stages if other is not work]

    def update(self, work: str, done: float, total: float, unit: str) -> None:
        """Implement WorkBoard.update."""
        with self._lock:
            known = self._counted.get(work) or Work(work, time.monotonic())
            self._counted[work] = replace(known, done=done, total=total, unit=unit)

    def end(self, work: str) -> None:
        """Implement WorkBoard.end."""
        with self._lock:
            self._counted.pop(work, None)

    def current(self) -> tuple[list[Work], list[Work]]:
        """Return the stages, the outermost first, and the counted work."""
        with self._lock:
            return list(self._stages), list(self._counted.values())
