"""Cost and gain of request routing: 131,072 requests of lognormal lengths on 512 engines with 64 slots.

The router is real; a clock simulates the engines. Each decodes up to 64 requests together in order of arrival, one
token per request and tick (every eighth engine: two ticks), requests more work when fewer than 64 requests are left and
all have started, and returns unstarted requests on demand. It is compared with a router that never takes requests back,
and with a static equal distribution of groups, which needs no reports.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from benchmarks.result import Result, compare
from benchmarks.sizes import size
from mcore_rl.rollout.tasks import ROOM, Tail, cut, share
from mcore_rl.runtime.engines.balance import EngineKey, LoadBalancer

ENGINES, SLOTS = size((512, 64), (8, 8))
GROUPS, SAMPLES = size((8_192, 16), (64, 4))
MEAN_LOG, SPREAD_LOG, LONGEST = size((7.0, 1.0, 16_384), (3.0, 1.0, 64))
"""Lognormal lengths in tokens: median 1,097, mean about 1,800."""
TICKS = [2 if index % 8 == 7 else 1 for index in range(ENGINES)]
"""Ticks per token, by engine."""
LIMIT_SECONDS = 1.0
"""Limit for the time that the router takes per step."""


def run() -> list[Result]:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(MEAN_LOG, SPREAD_LOG, (GROUPS, SAMPLES)), LONGEST).astype(np.int64)
    routed, kept = Routed(lengths, steals=True), Routed(lengths, steals=False)
    dealt = [TickEngine(SLOTS, ticks) for ticks in TICKS]
    # Dealt out by groups, as many to a slow engine as to a fast one.
    for engine, rows in zip(dealt, np.array_split(lengths, ENGINES), strict=True):
        engine.add(0, 0, rows.ravel().tolist(), 0)
    ticks = max(engine.drain() for engine in dealt)
    floor = lengths.sum() / (SLOTS * sum(1 / each for each in TICKS))
    note = (
        f"{routed.tasks} tasks, {routed.reports} reports of engines ({kept.reports} without moved requests), "
        f"{routed.asked} calls to give up requests, "
        f"{routed.stolen} requests moved, {routed.pieces} pieces at the end"
    )
    floors = f"{floor:.0f} ticks if every slot were always busy; the longest response takes {lengths.max()}"
    ends = f"the last response ends at {routed.ticks} and {kept.ticks}"
    dealt_out = "ticks until the last response, beside groups dealt out beforehand"
    not_moved = "ticks until the last response begins, beside engines that keep what they were given"
    return [
        compare("router's time per step", routed.seconds, LIMIT_SECONDS, "s/step", "<= 1.0", note),
        compare(dealt_out, routed.ticks, ticks, "ticks", note=floors),
        compare(not_moved, routed.last_begin, kept.last_begin, "ticks", note=ends),
    ]


@dataclass
class TickEngine:
    """Simulated engine with `slots`; decodes one token per request in `ticks_per_token`. Units: ticks, tokens."""

    slots: int
    ticks_per_token: int = 1
    running: list[tuple[int, int]] = field(default_factory=list)
    """Heap of (end tick, piece)."""
    waiting: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(length, piece, response)."""
    left: dict[int, int] = field(default_factory=dict)
    """Number of unfinished requests per piece."""
    received: int = 0
    last_begin: int = 0

    @property
    def requests(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, piece: int, first: int, lengths: list[int], now: int) -> None:
        self.left[piece] = len(lengths)
        self.received += len(lengths)
        self.waiting.extend((length, piece, first + i) for i, length in enumerate(lengths))
        self._fill(now)

    def end_one(self) -> tuple[int, int | None]:
        """End the next request. Returns its tick, and its piece if that is finished."""
        now, piece = heapq.heappop(self.running)
        self._fill(now)
        self.left[piece] -= 1
        if self.left[piece]:
            return now, None
        del self.left[piece]
        return now, piece

    def give_up(self, free: int) -> list[Tail]:
        """Return the unstarted ends of pieces."""
        waiting: dict[int, list[int]] = {}
        for _, piece, response in self.waiting:
            waiting.setdefault(piece, []).append(response)
        given_up = share([Tail(piece, rows[0], rows[-1] + 1, SAMPLES) for piece, rows in waiting.items()], free)
        first = {tail.task: tail.first for tail in given_up}
        # Requests at or beyond the first response that was given up leave the queue.
        self.waiting = deque(each for each in self.waiting if each[2] < first.get(each[1], each[2] + 1))
        for tail in given_up:
            self.left[tail.task] -= tail.last - tail.first
            if not self.left[tail.task]:
                del self.left[tail.task]
        return given_up

    def drain(self) -> int:
        """Return the tick at which the last request ends."""
        now = 0
        while self.running:
            now, _ = self.end_one()
        return now

    def _fill(self, now: int) -> None:
        while self.waiting and len(self.running) < self.slots:
            length, piece, _ = self.waiting.popleft()
            heapq.heappush(self.running, (now + length * self.ticks_per_token, piece))
            self.last_begin = now


class Routed:
    """Routes the requests of all groups.

    seconds: time of the router and of splitting tasks.
    reports: number of reports of engines.
    asked: number of requests to return unstarted work.
    Shapes: lengths int64 [groups, samples].
    """

    def __init__(self, lengths: np.ndarray, *, steals: bool) -> None:
        self._steals = steals
        self.seconds, self.ticks, self.reports, self.asked, self.stolen = 0.0, 0, 0, 0, 0
        self._engines = [TickEngine(SLOTS, ticks) for ticks in TICKS]
        self._clock: list[tuple[int, int]] = []
        """Heap of (next end tick, engine) for busy engines that do not request work."""
        self._more = [True] * ENGINES
        with self._timed():
            groups = cut(len(lengths), lengths.shape[1], ENGINES, SLOTS)
            self._balance = LoadBalancer(ROOM * SLOTS)
            for task, part in enumerate(groups):
                self._balance.add(task, 0, len(part) * lengths.shape[1])
            for index in range(ENGINES):
                self._balance.join(EngineKey(index))
        self.tasks = len(groups)
        self._lengths = [lengths[part].ravel() for part in groups]
        self._assign()
        while self._clock:
            self._advance(heapq.heappop(self._clock)[1])
        # Every request has ended on exactly one engine.
        assert not any(engine.left for engine in self._engines)

    @property
    def pieces(self) -> int:
        return len(self._balance.pieces)

    @property
    def last_begin(self) -> int:
        return max(engine.last_begin for engine in self._engines)

    def _advance(self, index: int) -> None:
        """Advance to the next end of a request of this engine."""
        engine = self._engines[index]
        self.ticks, piece = engine.end_one()
        # An engine reports when it has free slots and nothing waits, unless the last answer was that there is no more.
        asks = not engine.running or (self._more[index] and not engine.waiting and engine.requests < SLOTS)
        with self._timed():
            if piece is not None:
                self._balance.finished(piece)
            if asks:
                self._balance.report(EngineKey(index), engine.received, engine.requests)
        if asks:
            self.reports += 1
            self._assign()
        else:
            heapq.heappush(self._clock, (engine.running[0][0], index))

    def _assign(self) -> None:
        while True:
            with self._timed():
                given = self._balance.assign()
                more = self._balance.has_more
            for key, numbers in given.items():
                self._give(key.number, numbers, more)
            with self._timed():
                asks = self._balance.steal()
            if not asks:
                return
            for key, free in asks:
                self._ask(key.number, free)

    def _give(self, index: int, numbers: list[int], more: bool) -> None:
        engine = self._engines[index]
        self._more[index] = bool(numbers) and more
        for number in numbers:
            piece = self._balance.pieces[number]
            engine.add(number, piece.first, self._lengths[piece.task][piece.first : piece.last].tolist(), self.ticks)
        # The engine is busy again; its next event is its next end.
        heapq.heappush(self._clock, (engine.running[0][0], index))

    def _ask(self, victim: int, free: int) -> None:
        """Request unstarted work from an engine; without `steals` it returns none."""
        engine = self._engines[victim]
        given_up = engine.give_up(free) if self._steals else []
        self.asked += 1
        with self._timed():
            ends = [(tail.task, tail.first) for tail in given_up]
            unstarted = len(engine.waiting) if self._steals else 0
            self.stolen += self._balance.gave_up(EngineKey(victim), ends, unstarted)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began
