"""Simulated engines, trainer and time for benchmarks.asynchronous.driver.

An engine decodes up to SLOTS requests together in order of arrival, one token per request and step. A step takes
FIXED_SECONDS plus SECONDS_PER_REQUEST per request. Calls and weight syncs take no time.
"""

from __future__ import annotations

import heapq
import itertools
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.driver.load import write_records
from mcore_rl.rollout.tasks import Until
from mcore_rl.runtime.engines.process import EngineReport
from mcore_rl.runtime.health import PART_OF_CALLS, SECONDS_BETWEEN_LOOKS, SECONDS_TO_GATHER
from mcore_rl.types import RolloutScalars, RolloutTask

SLOTS = 64
"""Requests that an engine decodes at a time."""
FIXED_SECONDS, SECONDS_PER_REQUEST = 0.016, 0.00025
"""Duration of a decode step: 0.016 s in an empty engine, 0.032 s in a full one."""
PROMPT_TOKENS = 40


def step_seconds(running: int) -> float:
    """Return the duration of a decode step."""
    return FIXED_SECONDS + SECONDS_PER_REQUEST * running


@dataclass
class Meter:
    """CPU seconds of this thread, split into driver and simulation."""

    driver_seconds: float = 0.0
    clock_seconds: float = 0.0
    _driving: bool = False
    _since: float = field(default_factory=time.thread_time)

    def turn(self, driving: bool) -> bool:
        """Attribute CPU time from now on to the driver or the clock. Returns the previous state."""
        now, before = time.thread_time(), self._driving
        if before:
            self.driver_seconds += now - self._since
        else:
            self.clock_seconds += now - self._since
        self._driving, self._since = driving, now
        return before

    @contextmanager
    def driver(self) -> Iterator[None]:
        before = self.turn(True)
        try:
            yield
        finally:
            self.turn(before)


@dataclass(eq=False)
class Call:
    """Call of an engine or the trainer, with its result."""

    report: EngineReport | None = None


class CallOwner(Protocol):
    """health.Attendant for simulated calls."""

    def calls(self) -> Sequence[Call]: ...

    def ended(self, calls: Sequence[Call]) -> None: ...


@dataclass
class SimulatedClock:
    """Simulated Watch: time advances when the driver waits, to the event that ends the wait."""

    lengths: np.ndarray
    """Response tokens, int [groups, samples]; group n uses row n modulo the number of rows."""
    meter: Meter = field(default_factory=Meter)
    now: float = 0.0
    version: int = 0
    """Weight version of all engines."""
    attendant: CallOwner | None = None
    lost: dict[object, str] = field(default_factory=dict)
    waits: int = 0
    calls: int = 0
    """Number of calls to engines."""
    _ready: dict[Call, None] = field(default_factory=dict)
    """Finished calls that have not been collected, in order."""
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)  # breaks ties: functions cannot be compared

    def at(self, when: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happens))

    def end(self, call: Call) -> None:
        self._ready[call] = None

    def after(self, seconds: float) -> Call:
        """Return a call that ends after `seconds`."""
        call = Call()
        self.at(self.now + seconds, lambda: self.end(call))
        return call

    def get(self, refs: Sequence[Call]) -> None:
        """Wait until all calls have ended, like Watch.get."""
        pending = list(refs)
        while pending:
            _, pending = self.wait(pending, len(pending))

    def wait(self, refs: Sequence[Call], num_returns: int) -> tuple[list[Call], list[Call]]:
        """Wait like Watch.wait: pass the attendant's calls to it, in batches."""
        assert self.attendant is not None
        self.waits += 1
        own = self.attendant.calls()
        before = self.meter.turn(False)
        # The same numbers as in Watch.wait, because the driver's cost depends on the calls per wait.
        enough = max(1, len(own) // PART_OF_CALLS)
        self._pass_time(enough, self.now + (SECONDS_BETWEEN_LOOKS if enough == 1 else SECONDS_TO_GATHER))
        ended, self._ready = self._ready, {}
        there = [ref for ref in refs if ref in ended]
        # Watch passes every other ended call to the attendant, whose work counts as the driver's.
        of_attendant = [call for call in ended if call not in refs]
        self.meter.turn(before)
        if of_attendant:
            self.attendant.ended(of_attendant)
        return there, [ref for ref in refs if ref not in there]

    def _pass_time(self, enough: int, latest: float) -> None:
        """Advance time until `enough` calls have ended or `latest` is reached."""
        while len(self._ready) < enough and self._events and self._events[0][0] <= latest:
            self.now, _, happens = heapq.heappop(self._events)
            happens()
        if len(self._ready) < enough:
            self.now = latest

    def value(self, call: Call) -> EngineReport | None:
        return call.report

    def blame_the_dead(self) -> None: ...

    def get_started(self, starts: Mapping[Call, Sequence[object]]) -> None: ...


@dataclass
class SimulatedMethod:
    """Remote method of an engine's handle."""

    engine: SimulatedEngine
    method: Callable[..., Call]

    def remote(self, *arguments: object) -> Call:
        meter = self.engine.clock.meter
        before = meter.turn(False)
        self.engine.clock.calls += 1
        # Handles pack the arguments, because these methods of an engine's process are `packed`.
        given = pickle.loads(arguments[0]) if isinstance(arguments[0], bytes) else arguments
        call = self.method(*given)
        meter.turn(before)
        return call


@dataclass
class Begun:
    """Running task: its lengths and the number of unfinished requests."""

    number: int
    task: RolloutTask
    tokens: np.ndarray
    left: int
    version: int
    """Weight version at the start."""


class SimulatedEngine:
    """Simulated engine: handle, process and decoding."""

    def __init__(self, clock: SimulatedClock, records_dir: Path) -> None:
        self.clock, self._records_dir = clock, records_dir
        self.run, self.begin = SimulatedMethod(self, self._run), SimulatedMethod(self, self._begin)
        self.busy_seconds = 0.0
        self._decoded = 0.0
        """Tokens that a request running since the start would have now."""
        self._since, self._turn, self._key = 0.0, 0, itertools.count()
        self._running: list[tuple[float, int, Begun]] = []
        """Heap of the values of `_decoded` at which requests end."""
        self._waiting: deque[tuple[int, Begun]] = deque()
        """Tokens of requests that wait for a slot."""
        self._order = itertools.count()
        self._ended: list[tuple[int, int, RolloutScalars]] = []
        self._received = 0
        self._poll: Call | None = None

    def _run(self, tasks: Sequence[tuple[int, RolloutTask]], until: Until, forget: Sequence[int]) -> Call:
        assert until is Until.ANY
        assert self._poll is None
        call = self._poll = Call()
        self._add(tasks)
        self._tell()
        return call

    def _begin(self, tasks: Sequence[tuple[int, RolloutTask]]) -> Call:
        call = Call()
        self._add(tasks)
        self.clock.end(call)  # like EngineProcess.begin, which does not wait for the tasks
        return call

    def _add(self, tasks: Sequence[tuple[int, RolloutTask]]) -> None:
        if not tasks:
            return
        self._decode()  # with the step time before the new requests
        for number, task in tasks:
            self._received += task.num_responses
            tokens = self.clock.lengths[int(task.group_ids[0]) % len(self.clock.lengths)]
            begun = Begun(number, task, tokens, len(tokens), self.clock.version)
            self._waiting.extend((length, begun) for length in tokens.tolist())
        self._fill()

    def _decode(self) -> None:
        """Advance decoding to the current time."""
        if self._running:
            # All running requests advance together, so one number of decoded tokens per engine suffices.
            elapsed = self.clock.now - self._since
            self._decoded += elapsed / step_seconds(len(self._running))
            self.busy_seconds += elapsed
        self._since = self.clock.now

    def _fill(self) -> None:
        while self._waiting and len(self._running) < SLOTS:
            length, begun = self._waiting.popleft()
            heapq.heappush(self._running, (self._decoded + length, next(self._order), begun))
        self._turn += 1  # makes the event of the previous next request obsolete: the step time has changed
        if self._running:
            seconds = (self._running[0][0] - self._decoded) * step_seconds(len(self._running))
            turn = self._turn
            self.clock.at(self.clock.now + max(0.0, seconds), lambda: self._end(turn))

    def _end(self, turn: int) -> None:
        """End the next request, unless new requests have made this event obsolete."""
        if turn != self._turn:
            return
        self._decode()
        self._decoded = self._running[0][0]  # removes rounding errors, which could leave the request unfinished
        while self._running and self._running[0][0] <= self._decoded:
            _, _, begun = heapq.heappop(self._running)
            begun.left -= 1
            if not begun.left:  # a task ends with its longest response
                write_records(self._records_dir, begun.task)
                self._ended.append((begun.number, next(self._key), scalars_of(begun, self.clock.version)))
        self._fill()
        self._tell()

    def _tell(self) -> None:
        # Like an engine: a call for results ends as soon as there is one, and a later one gets the rest.
        if self._poll is not None and self._ended:
            left = len(self._running) + len(self._waiting)
            self._poll.report = EngineReport(self._ended, self._received, left, self.busy_seconds, 0)
            self.clock.end(self._poll)
            self._poll, self._ended = None, []


def scalars_of(begun: Begun, version: int) -> RolloutScalars:
    """Return the scalars of a task that ends now. All tokens count as sampled by the first version."""
    count, task, tokens = len(begun.tokens), begun.task, begun.tokens
    rewards = (tokens % 2).astype(np.float32)
    versions = np.empty((count, 2), np.int32)
    versions[:, 0], versions[:, 1] = begun.version, version
    return RolloutScalars(
        np.repeat(task.group_ids, count), np.repeat(task.prompt_rows, count), tokens + PROMPT_TOKENS, tokens, tokens,
        rewards, rewards, np.zeros(count, np.uint8), versions, digests=tokens,
        version_tokens=((begun.version, int(tokens.sum())),),
    )  # fmt: skip
