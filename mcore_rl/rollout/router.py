"""Which engine runs which task: whoever has fewest tokens in flight, of those that ask for more. When nothing waits any
more, whoever has begun least of what it was given is asked for some of it."""

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
"""Times what an engine has under way together it is given at most. It asks for more when only that is left: what
ends is replaced by what waits in the engine, not by what the driver sends."""


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
    and one task in any case where it has none. All of it costs tasks times the logarithm of engines.

    Engines ask when they have begun all that they were given, and can decode more. While others may have requests that
    they have not begun, those that get nothing go on asking: `steal` says whom to ask for some of these, and what comes
    of it is offered, and told by `gave_up`. Not so where nothing `steals`.
    """

    def __init__(self, room: int, *, steals: bool = True) -> None:
        self._room, self._slots, self._steals = room, max(1, room // ROOM), steals
        self._waiting: deque[int] = deque()
        self._works: dict[int, Work] = {}
        self._tasks: dict[int, set[int]] = {}
        """What an engine was given and has not finished."""
        self._asking: list[tuple[float, int, int]] = []
        """A heap of (tokens, requests, engine): what it has not finished."""
        self._unbegun: dict[int, int] = {}
        """Requests of an engine that may not have begun, at most."""
        self._victims: list[tuple[int, int]] = []
        """A heap of (-unbegun, engine), among them some that no longer are so."""
        self._asked: dict[int, int] = {}
        """Engines that are asked to give some up, and how many requests they were given since."""

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def has_more(self) -> bool:
        """Whether an engine that asks later may get something."""
        return bool(self._waiting) or (len(self._tasks) > 1 and self._may_steal())

    def offer(self, task: int, work: Work, *, first: bool = False) -> None:
        """It waits from now on, before all else if it is to be the `first`."""
        self._works[task] = work
        if first:
            self._waiting.appendleft(task)
        else:
            self._waiting.append(task)

    def ask(self, engine: int, unfinished: Work) -> None:
        """It may be given more, beside what it has not finished, all of which has begun."""
        self._tasks.setdefault(engine, set())
        self._note_unbegun(engine, 0)
        heapq.heappush(self._asking, (unfinished.tokens, unfinished.requests, engine))

    def finished(self, task: int, engine: int) -> None:
        self._tasks[engine].remove(task)

    def leave(self, engine: int) -> None:
        """It is given nothing more; what it has not finished waits again, before all else."""
        self._waiting.extendleft(sorted(self._tasks.pop(engine, ()), reverse=True))
        self._unbegun.pop(engine, None)
        self._asked.pop(engine, None)
        self._asking = [asking for asking in self._asking if asking[2] != engine]
        heapq.heapify(self._asking)

    def assign(self) -> dict[int, list[int]]:
        """What each engine that asked gets. Those that get nothing, since there is nothing to be had or they have no
        room, are among them; but for those who have nothing to do, which go on asking."""
        given: dict[int, list[int]] = {}
        loads = self._asking
        while loads and self._waiting:
            tokens, requests, engine = loads[0]
            work = self._works[self._waiting[0]]
            if self._tasks[engine] and requests + work.requests > self._room:
                heapq.heappop(loads)
                given.setdefault(engine, [])
                continue
            task = self._waiting.popleft()
            self._tasks[engine].add(task)
            given.setdefault(engine, []).append(task)
            heapq.heapreplace(loads, (tokens + work.tokens, requests + work.requests, engine))
        for engine, tasks in given.items():
            self._note_given(engine, sum(self._works[task].requests for task in tasks))
        if given or not self._may_steal():
            self._dismiss(given)
        return given

    def steal(self) -> list[tuple[int, int]]:
        """Engines to be asked to give some requests up that they have not begun, those first that have most, and how
        many the engine could begin at once that it is for. At most one for each that asks, and each once at a time."""
        if not self._steals or self._waiting or len(self._asking) <= len(self._asked) or self._top_victim() is None:
            return []
        asks: list[tuple[int, int]] = []
        askers = iter(sorted(self._asking)[len(self._asked) :])
        while (victim := self._top_victim()) is not None and (asker := next(askers, None)) is not None:
            heapq.heappop(self._victims)
            self._asked[victim] = 0
            asks.append((victim, max(0, self._slots - asker[1])))
        return asks

    def gave_up(self, engine: int, unbegun: int) -> None:
        """It was asked for some, and has so many requests left that have not begun."""
        self._note_unbegun(engine, unbegun + self._asked.pop(engine))

    def _dismiss(self, given: dict[int, list[int]]) -> None:
        """Those that have been given something ask no more; nor, where nothing is to be had, those who have something
        to do."""
        hopeless = not self._waiting and not self._may_steal()
        for _, _, engine in self._asking:
            if hopeless and engine not in given and self._tasks[engine]:
                given[engine] = []
        self._asking = [asking for asking in self._asking if asking[2] not in given]
        heapq.heapify(self._asking)

    def _may_steal(self) -> bool:
        return self._steals and (bool(self._asked) or self._top_victim() is not None)

    def _top_victim(self) -> int | None:
        """Who may have most that has not begun, of those that are not asked for it."""
        while self._victims:
            unbegun, engine = self._victims[0]
            if self._unbegun.get(engine) == -unbegun and engine not in self._asked:
                return engine
            heapq.heappop(self._victims)
        return None

    def _note_given(self, engine: int, requests: int) -> None:
        if engine in self._asked:
            self._asked[engine] += requests
        self._note_unbegun(engine, self._unbegun[engine] + requests)

    def _note_unbegun(self, engine: int, unbegun: int) -> None:
        self._unbegun[engine] = unbegun
        if unbegun:
            heapq.heappush(self._victims, (-unbegun, engine))
