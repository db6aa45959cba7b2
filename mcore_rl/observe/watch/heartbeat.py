"""Signs of life of the process that holds a run directory: it renews the modification time of its record."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Renewal = tuple[str, float]
"""Description of the holder and modification time of its record, in seconds since 1970 by the file server's clock."""
SILENT_AFTER_SECONDS = 90.0
"""Age of the record after which the holder counts as dead: more than the lock's limit of 60 s, since a file server may
show clients an old modification time."""


@dataclass(frozen=True)
class HolderState:
    """Process that holds the run directory. `silent_seconds`: time since it last renewed its record."""

    description: str
    silent_seconds: float

    @property
    def is_alive(self) -> bool:
        return self.silent_seconds < SILENT_AFTER_SECONDS


class Heartbeat:
    """Measures the silence of the holder.

    The first observation compares two clocks. After the record has changed once, only this host's clock counts, so that
    a clock that is wrong by minutes does not show a live run as dead.
    """

    def __init__(self, renewal: Callable[[], Renewal | None]) -> None:
        """`renewal` reads the record; None: no process holds the directory."""
        self._renewal = renewal
        self._seen: Renewal | None = None
        self._alive_at = 0.0

    def holder(self) -> HolderState | None:
        """Return the current holder; None if no process holds the directory."""
        renewal, now = self._renewal(), time.monotonic()
        if renewal is None:
            self._seen = None
            return None
        if self._seen is None:
            self._alive_at = now - max(time.time() - renewal[1], 0.0)
        elif renewal != self._seen:
            self._alive_at = now
        self._seen = renewal
        return HolderState(renewal[0], now - self._alive_at)
