"""Results of requests on their way from the loop's thread to another one."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator

from mcore_rl.types import Completion


class EndedRequests:
    """Results for another thread, which is woken once for all requests that end in the same step. Each wake-up takes
    the loop's thread up to 0.3 ms, because both threads then compete for the interpreter."""

    def __init__(self) -> None:
        self._results: deque[Completion | BaseException] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_waking = False

    def add(self, result: Completion | BaseException) -> None:
        """Add a result; a Listener."""
        self._results.append(result)
        if not self._is_waking:
            self._is_waking = True
            self._wakes.put(None)

    def take(self) -> Iterator[Completion | BaseException]:
        """Wait for results, and yield those that have arrived, also in the meantime."""
        self._wakes.get()
        self._is_waking = False  # reset first, so that results added from now on wake this thread again
        while self._results:
            yield self._results.popleft()
