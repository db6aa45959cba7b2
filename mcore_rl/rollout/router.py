"""Which engine runs which task: whoever has fewest tokens in flight, of those that ask for more."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

TASKS_PER_ENGINE = 2
"""At least, where there are as many groups: the finer, the more evenly engines end, and the more the driver does."""
TASKS_AT_ONCE = 2
"""At least so many tasks make up what an engine decodes together."""
ROOM = 2
"""Times what an engine decodes together it is given at most. It asks for more when only that is left: what ends is
replaced by what waits in the engine, not by what the driver sends."""


def cut(num_groups: int, samples: int, num_engines: int, num_concurrent: int) -> list[np.ndarray]:
    """Which groups of `samples` requests make a task: all of them in order, so that neither the number of engines nor
    their speed changes the order of responses. Groups stay whole: their samples share the prompt in an engine's prefix
    cache. An engine decodes `num_concurrent` requests together."""
    if num_engines == 1:
        return [np.arange(num_groups)] if num_groups else []
    most = max(1, num_concurrent // (TASKS_AT_ONCE * samples))
    parts = max(num_engines * TASKS_PER_ENGINE, -(-num_groups // most))
    return [part for part in np.array_split(np.arange(num_groups), parts) if len(part)]


@dataclass(frozen=True)
class Work:
    """What a task costs: requests, and tokens that they are expected to have, prompts and responses."""

    requests: int
    tokens: float


class Router:
    """Tasks wait here, in order, for engines that ask. One is given as many as it has room for: up to `room` requests,
    and one task in any case where it has none. All of it costs tasks times the logarithm of engines."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._waiting: deque[int] = deque()
        self._works: dict[int, Work] = {}
        self._tasks: dict[int, set[int]] = {}
        """What an engine was given and has not finished."""
        self._asking: list[tuple[float, int, int]] = []
        """A heap of (tokens, requests, engine): what it has not finished."""

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def offer(self, task: int, work: Work) -> None:
        self._works[task] = work
        self._waiting.append(task)

    def ask(self, engine: int, unfinished: Work) -> None:
        """It may be given more, beside what it has not finished."""
        self._tasks.setdefault(engine, set())
        heapq.heappush(self._asking, (unfinished.tokens, unfinished.requests, engine))

    def finished(self, task: int, engine: int) -> None:
        self._tasks[engine].remove(task)

    def leave(self, engine: int) -> None:
        """It is given nothing more; what it has not finished waits again, before all else."""
        self._waiting.extendleft(sorted(self._tasks.pop(engine, ()), reverse=True))
        self._asking = [asking for asking in self._asking if asking[2] != engine]
        heapq.heapify(self._asking)

    def assign(self) -> dict[int, list[int]]:
        """What each engine that asked gets. Those that get nothing, since nothing waits or they have no room, are among
        them; but for those who have nothing to do, which go on asking."""
        given: dict[int, list[int]] = {}
        loads = self._asking
        while loads:
            tokens, requests, engine = loads[0]
            work = self._works[self._waiting[0]] if self._waiting else None
            if work is None or (requests and requests + work.requests > self._room):
                heapq.heappop(loads)
                given.setdefault(engine, [])
                continue
            task = self._waiting.popleft()
            self._tasks[engine].add(task)
            given.setdefault(engine, []).append(task)
            heapq.heapreplace(loads, (tokens + work.tokens, requests + work.requests, engine))
        for engine in [engine for engine in given if not self._tasks[engine]]:
            del given[engine]
            heapq.heappush(loads, (0.0, 0, engine))
        return given
