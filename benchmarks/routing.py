"""What routing costs the driver, and what it gains: 131,072 requests of lognormal lengths over 512 engines of 64 slots.

The router is the product's; engines are replaced by a clock: each decodes up to 64 requests together, a token of each
per tick, in the order in which they came, and asks for more when fewer than 64 are left, as engines do. Beside it: all
groups dealt out beforehand, as many to each engine, which is what a dispatcher without reports can do.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from benchmarks.result import Result
from mcore_rl.rollout.router import ROOM, Router, Work, cut

ENGINES, SLOTS = 512, 64
GROUPS, SAMPLES = 8_192, 16
MEAN_LOG, SPREAD_LOG, LONGEST = 7.0, 1.0, 16_384
"""Of lengths in tokens: median 1,097, mean about 1,800."""
LIMIT_SECONDS = 1.0


def run() -> list[Result]:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(MEAN_LOG, SPREAD_LOG, (GROUPS, SAMPLES)), LONGEST).astype(np.int64)
    routed = Routed(lengths)
    dealt = [Engine(SLOTS) for _ in range(ENGINES)]
    for engine, rows in zip(dealt, np.array_split(lengths, ENGINES), strict=True):
        engine.add(0, rows.ravel().tolist(), 0)
    ticks = max(engine.drain() for engine in dealt)
    floor = lengths.sum() / (ENGINES * SLOTS)
    note = f"{routed.tasks} tasks, {routed.reports} reports of engines"
    return [
        Result(
            "router's time per step",
            routed.seconds,
            LIMIT_SECONDS,
            "s/step",
            routed.seconds / LIMIT_SECONDS,
            "<= 1.0",
            note,
        ),
        Result(
            "ticks until the last response, beside groups dealt out beforehand",
            routed.ticks,
            ticks,
            "ticks",
            routed.ticks / ticks,
            "",
            f"{floor:.0f} ticks if every slot were busy to the end; the longest response alone takes {lengths.max()}",
        ),
    ]


@dataclass
class Engine:
    """Requests of tasks, `slots` at a time. Units: ticks, tokens."""

    slots: int
    running: list[tuple[int, int]] = field(default_factory=list)
    """A heap of (tick at which it ends, task)."""
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """(length, task)."""
    left: dict[int, int] = field(default_factory=dict)
    """Requests of a task that have not ended."""

    @property
    def requests(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, task: int, lengths: list[int], now: int) -> None:
        self.left[task] = len(lengths)
        self.waiting.extend((length, task) for length in lengths)
        self._fill(now)

    def end_one(self) -> tuple[int, int | None]:
        """The tick at which the next request ends, and the task that ends with it."""
        now, task = heapq.heappop(self.running)
        self._fill(now)
        self.left[task] -= 1
        if self.left[task]:
            return now, None
        del self.left[task]
        return now, task

    def drain(self) -> int:
        """The tick at which the last request ends."""
        now = 0
        while self.running:
            now, _ = self.end_one()
        return now

    def _fill(self, now: int) -> None:
        while self.waiting and len(self.running) < self.slots:
            length, task = self.waiting.popleft()
            heapq.heappush(self.running, (now + length, task))


class Routed:
    """Every group's requests through the router. `seconds` are those of the router alone, `reports` how often an engine
    came back to it. Shapes: lengths int64 [groups, samples]."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths, self._mean = lengths, float(lengths.mean())
        self.seconds, self.ticks, self.reports = 0.0, 0, 0
        self._engines = [Engine(SLOTS) for _ in range(ENGINES)]
        self._clock: list[tuple[int, int]] = []
        """A heap of (tick of its next end, engine), of the engines with work."""
        with self._timed():
            self._groups = cut(len(lengths), lengths.shape[1], ENGINES, SLOTS)
            self._router = Router(ROOM * SLOTS)
            for number, groups in enumerate(self._groups):
                self._router.offer(number, self._work(len(groups) * lengths.shape[1]))
            for index in range(ENGINES):
                self._router.ask(index, Work(0, 0.0))
        self._assign()
        while self._clock:
            self._advance(heapq.heappop(self._clock)[1])

    @property
    def tasks(self) -> int:
        return len(self._groups)

    def _work(self, requests: int) -> Work:
        return Work(requests, requests * self._mean)

    def _advance(self, index: int) -> None:
        """To the next end of a request of that engine."""
        engine = self._engines[index]
        self.ticks, task = engine.end_one()
        asks = engine.requests < SLOTS and (self._router.has_waiting or not engine.running)
        with self._timed():
            if task is not None:
                self._router.finished(task, index)
            if asks:
                self._router.ask(index, self._work(engine.requests))
        if asks:
            self.reports += 1
            self._assign()
        else:
            heapq.heappush(self._clock, (engine.running[0][0], index))

    def _assign(self) -> None:
        with self._timed():
            given = self._router.assign()
        for index, numbers in given.items():
            engine = self._engines[index]
            for number in numbers:
                engine.add(number, self._lengths[self._groups[number]].ravel().tolist(), self.ticks)
            heapq.heappush(self._clock, (engine.running[0][0], index))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began
