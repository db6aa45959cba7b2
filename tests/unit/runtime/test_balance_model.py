"""Steals at the end of a step, on a model of engines with message delays."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.rollout.tasks import ROOM, Tail, cut, share
from mcore_rl.runtime.engines.balance import EngineKey, LoadBalancer


@dataclass
class Engine:
    """Engine that runs `slots` requests concurrently, in the order of arrival. A request is (piece, response)."""

    speed: float
    slots: int
    running: dict[tuple[int, int], float] = field(default_factory=dict)
    """End time of each running request."""
    waiting: list[tuple[int, int]] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    """End of each unfinished piece."""
    received: int = 0
    more: bool = False
    called: bool = False
    alive: bool = True


class Model:
    """Simulation of a step. `delay` returns the delay of a message; `deaths` has the time of death by engine. Without
    `steals`, no requests are stolen."""

    def __init__(
        self,
        lengths: np.ndarray,
        speeds: list[float],
        *,
        slots: int,
        delay: Callable[[], float] = lambda: 0.0,
        deaths: dict[int, float] | None = None,
        steals: bool = True,
    ) -> None:
        self.lengths, self.delay = lengths.ravel(), delay
        self.samples = lengths.shape[1]
        self.engines = [Engine(speed, slots) for speed in speeds]
        parts = cut(len(lengths), self.samples, len(speeds), slots)
        self.starts = [int(groups[0]) * self.samples for groups in parts]
        self.balance = LoadBalancer(ROOM * slots, steals=steals)
        self.pieces = self.balance.pieces
        for task, groups in enumerate(parts):
            self.balance.add(task, 0, len(groups) * self.samples)
        for index in range(len(speeds)):
            self.balance.join(EngineKey(index))
        self.made: dict[int, tuple[int, int]] = {}
        """Engine and number of responses of finished pieces."""
        self.now, self.stolen, self.last_end = 0.0, 0, 0.0
        self.asks: set[int] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for index, moment in (deaths or {}).items():
            self._at(moment, lambda index=index: self._die(index))  # type: ignore[misc]
        self._drive()
        while self._events and (len(self.made) < len(self.pieces) or self.asks):
            self.now, _, event = heapq.heappop(self._events)
            event()

    @property
    def done(self) -> list[int]:
        """Return the numbers of all finished responses, with repetitions."""
        found = []
        for number, piece in self.pieces.items():
            start = self.starts[piece.task]
            assert self.made[number][1] == piece.last - piece.first
            found += range(start + piece.first, start + piece.last)
        return sorted(found)

    def _at(self, moment: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), event))

    def _drive(self) -> None:
        for key, numbers in self.balance.assign().items():
            index, engine = key.number, self.engines[key.number]
            assert not engine.called
            engine.called = True
            spans = [(n, self.pieces[n].first, self.pieces[n].last) for n in numbers]
            more = bool(numbers) and self.balance.has_more
            self._at(self.now + self.delay(), lambda i=index, s=spans, m=more: self._begin(i, s, m))  # type: ignore[misc]
        for (victim, _), free in self.balance.steal():
            assert victim not in self.asks
            self.asks.add(victim)
            self._at(self.now + self.delay(), lambda v=victim, f=free: self._give_up(v, f))  # type: ignore[misc]

    def _begin(self, index: int, spans: list[tuple[int, int, int]], more: bool) -> None:
        engine = self.engines[index]
        for number, first, last in spans:
            assert number not in engine.last
            engine.last[number] = last
            engine.received += last - first
            engine.waiting += [(number, response) for response in range(first, last)]
        engine.more = more
        self._fill(index)
        self._report(index)

    def _fill(self, index: int) -> None:
        engine = self.engines[index]
        while engine.waiting and len(engine.running) < engine.slots:
            request = engine.waiting.pop(0)
            number, response = request
            length = self.lengths[self.starts[self.pieces[number].task] + response]
            engine.running[request] = end = self.now + length / engine.speed
            self._at(end, lambda i=index, r=request: self._end(i, r))  # type: ignore[misc]

    def _end(self, index: int, request: tuple[int, int]) -> None:
        engine = self.engines[index]
        if engine.alive:
            del engine.running[request]
            self.last_end = self.now
            self._fill(index)
            self._report(index)

    def _report(self, index: int) -> None:
        """Report if requested: all requests have started and slots are free, or all have ended."""
        engine = self.engines[index]
        left = len(engine.running) + len(engine.waiting)
        asks = engine.more and not engine.waiting and left < engine.slots
        if not engine.alive or not engine.called or (left and not asks):
            return
        engine.more = False
        unfinished = {number for number, _ in [*engine.running, *engine.waiting]}
        ended = {number: engine.last.pop(number) for number in [*engine.last] if number not in unfinished}
        received = engine.received
        self._at(self.now + self.delay(), lambda: self._take(index, ended, received, left))

    def _take(self, index: int, ended: dict[int, int], received: int, left: int) -> None:
        engine = self.engines[index]
        if not engine.alive:
            return
        engine.called = False
        for number, last in ended.items():
            self.balance.finished(number)
            assert number not in self.made
            self.made[number] = index, last - self.pieces[number].first
        self.balance.report(EngineKey(index), received, left)
        self._drive()

    def _give_up(self, victim: int, free: int) -> None:
        engine = self.engines[victim]
        if not engine.alive:
            return
        tails = []
        for number, last in engine.last.items():
            unbegun = [response for piece, response in engine.waiting if piece == number]
            assert unbegun == list(range(last - len(unbegun), last))
            tails.append(Tail(number, last - len(unbegun), last, self.samples))
        chosen = share(tails, free)
        for tail in chosen:
            gone = {(tail.task, response) for response in range(tail.first, tail.last)}
            engine.waiting = [request for request in engine.waiting if request not in gone]
            if tail.first == self.pieces[tail.task].first:
                del engine.last[tail.task]
            else:
                engine.last[tail.task] = tail.first
        self._report(victim)
        left = len(engine.waiting)
        self._at(self.now + self.delay(), lambda: self._take_given_up(victim, chosen, left))

    def _take_given_up(self, victim: int, chosen: list[Tail], unbegun: int) -> None:
        if not self.engines[victim].alive:
            return
        self.asks.remove(victim)
        for tail in chosen:
            assert self.pieces[tail.task].last == tail.last
        self.stolen += self.balance.gave_up(EngineKey(victim), [(tail.task, tail.first) for tail in chosen], unbegun)
        self._drive()

    def _die(self, index: int) -> None:
        self.engines[index].alive = False
        self.asks.discard(index)
        self.balance.leave([EngineKey(index)])
        for number in [number for number, (maker, _) in self.made.items() if maker == index]:
            del self.made[number]
            self.balance.requeue([number])
        self._drive()


def lengths_of(seed: int, groups: int, samples: int, spread: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(3.0, spread, (groups, samples))


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 40),
    samples=st.integers(1, 6),
    slots=st.integers(1, 12),
    num_engines=st.integers(2, 6),
    mean_delay=st.sampled_from([0.0, 0.1, 5.0, 100.0]),
    num_deaths=st.integers(0, 2),
)
def test_every_request_returns_once_despite_deaths_and_delays(
    seed: int, groups: int, samples: int, slots: int, num_engines: int, mean_delay: float, num_deaths: int
) -> None:
    chance = random.Random(seed)
    model = Model(
        lengths_of(seed, groups, samples),
        [chance.choice([1.0, 1.0, 3.0, 0.2]) for _ in range(num_engines)],
        slots=slots,
        delay=lambda: chance.random() * 2 * mean_delay,
        deaths={i: chance.random() * 400 for i in chance.sample(range(num_engines), min(num_deaths, num_engines - 1))},
    )
    assert model.done == list(range(groups * samples))
    assert not model.asks


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 40),
    samples=st.integers(1, 4),
    slots=st.integers(4, 12),
    num_engines=st.integers(2, 6),
)
def test_steals_delay_the_last_response_by_at_most_one_response(
    seed: int, groups: int, samples: int, slots: int, num_engines: int
) -> None:
    """No slot is free while a request waits anywhere, so until the last request starts all engines are fully used."""
    chance = random.Random(seed)
    speeds = [chance.choice([1.0, 2.0, 0.25]) for _ in range(num_engines)]
    lengths = lengths_of(seed, groups, samples)
    with_, without = (Model(lengths, speeds, slots=slots, steals=steals) for steals in (True, False))
    assert with_.done == without.done == list(range(groups * samples))
    assert with_.last_end <= without.last_end + lengths.max() / min(speeds) + 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_slow_engines_give_up_unstarted_requests(seed: int) -> None:
    """One of four engines is five times slower."""
    speeds = [1.0, 1.0, 1.0, 0.2]
    lengths = lengths_of(seed, 32, 8, spread=0.2)
    with_, without = (Model(lengths, speeds, slots=32, steals=steals) for steals in (True, False))
    assert with_.stolen > 0
    assert with_.last_end < 0.75 * without.last_end
