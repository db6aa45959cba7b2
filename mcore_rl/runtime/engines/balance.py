"""Policy of the scheduler's queue: the engine with the fewest requests gets the next piece of a task, and engines that
have started everything take requests from the engine with the most unstarted ones."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mcore_rl.rollout.tasks import ROOM

if TYPE_CHECKING:
    from mcore_rl.runtime.delivery import TrajectoryPlace
    from mcore_rl.types import RolloutScalars

MAX_ENTRIES_PER_ENGINE = 16
"""Size limit of the heap of loads; all but one entry of an engine are out of date."""


class EngineKey(NamedTuple):
    """One incarnation of an engine: its number in the fleet, and how often it was replaced before."""

    number: int
    incarnation: int = 0


@dataclass(frozen=True)
class FinishedPiece:
    """Trajectories and scalars of a piece, and the engine that keeps them."""

    engine: EngineKey
    place: TrajectoryPlace
    scalars: RolloutScalars


@dataclass
class TaskPiece:
    """Responses of a task, from `first` up to `last` (exclusive), that one engine generates."""

    task: int
    first: int
    last: int
    engine: EngineKey | None = None
    """Engine that was given the piece and has not finished it."""
    finished: FinishedPiece | None = None

    @property
    def num_requests(self) -> int:
        return self.last - self.first


class LoadBalancer:
    """Queue of pieces and loads of engines. An operation takes at most logarithmic time in the number of engines, plus
    linear time in the number of idle ones.

    With `room`, an engine is given up to `room` requests, and one piece in any case if it has none. If idle engines may
    steal, it is given up to its even share of all requests, which takes fewer calls. It is given more only after it
    reported that it has started everything and has free slots. While other engines may have unstarted requests, engines
    that got nothing stay candidates, and `steal` returns the engines to take requests from.
    Without `room`, engines take pieces at any time and nothing is stolen.
    """

    def __init__(
        self, room: int | None, *, steals: bool = True, serves: Callable[[EngineKey], bool] = lambda engine: True
    ) -> None:
        """Create an empty queue without engines. `serves` returns whether an engine can be given pieces now."""
        # The scheduler sets `room` to ROOM times the number of requests that an engine decodes concurrently.
        self._room, self._slots, self._serves = room, max(1, (room or 0) // ROOM), serves
        self._steals = steals and room is not None
        self.pieces: dict[int, TaskPiece] = {}
        self.running_requests = 0
        """Number of unfinished requests, including queued ones."""
        self._num_added = 0
        self._of_task: dict[int, list[int]] = {}
        self.queue: deque[int] = deque()
        self.given: dict[EngineKey, set[int]] = {}
        """Unfinished pieces of each engine."""
        self._loads: dict[EngineKey, int] = {}
        """Unfinished requests of each engine."""
        self._sent: dict[EngineKey, int] = {}
        """Number of requests given to each engine since it joined."""
        self.candidates: set[EngineKey] = set()
        """Engines that may be given pieces."""
        self._heap: list[tuple[int, EngineKey]] = []
        """Heap of (load, candidate); may contain outdated entries."""
        self._unstarted: dict[EngineKey, int] = {}
        """Upper bound of an engine's unstarted requests."""
        self._victims: list[tuple[int, EngineKey]] = []
        """Heap of (-unstarted, engine); may contain outdated entries."""
        self._asked: dict[EngineKey, int] = {}
        """Engines with a steal in progress, and the number of requests given to them since it began."""

    @property
    def is_stealing(self) -> bool:
        """True while an answer to a steal is pending."""
        return bool(self._asked)

    @property
    def has_more(self) -> bool:
        """True if an engine that reports later may be given requests."""
        return bool(self.queue) or (len(self.given) > 1 and self._may_steal())

    def add(self, task: int, first: int, last: int) -> int:
        """Append a piece to the queue; returns its number."""
        number = self._new(task, first, last)
        self.requeue([number])
        return number

    def of_task(self, task: int) -> list[TaskPiece]:
        """Return a task's pieces, in the order of its responses."""
        numbers = self._of_task[task]
        if len(numbers) == 1:  # nearly every task
            return [self.pieces[numbers[0]]]
        return sorted((self.pieces[number] for number in numbers), key=lambda piece: piece.first)

    def num_pieces(self, task: int) -> int:
        return len(self._of_task[task])

    def drop(self, task: int) -> None:
        """Forget a finished task."""
        for number in self._of_task.pop(task):
            del self.pieces[number]

    def requeue(self, numbers: Sequence[int], *, first: bool = False) -> None:
        """Put pieces that no engine has at the end of the queue, or in front of everything else."""
        if first:
            # `extendleft` reverses its argument.
            self.queue.extendleft(sorted(numbers, reverse=True))
        else:
            self.queue.extend(numbers)
        self.running_requests += sum(self.pieces[number].num_requests for number in numbers)

    def join(self, engine: EngineKey) -> None:
        """Make an engine without a call a candidate; its load stays."""
        self._make_candidate(engine, self._loads.get(engine, 0))

    def report(self, engine: EngineKey, received: int, left: int) -> None:
        """Process a report: the engine has `received` requests since it joined and has not finished `left` of them, all
        of which have started. Requests that are still on the way to the engine count as unfinished."""
        self._make_candidate(engine, self._sent.get(engine, 0) - received + left)

    def finished(self, number: int) -> TaskPiece:
        """Take a piece from its engine, which has finished it, and return it."""
        piece = self.pieces[number]
        assert piece.engine is not None, f"piece {number} finished on no engine"
        self.given[piece.engine].remove(number)
        piece.engine = None
        return piece

    def leave(self, engines: Collection[EngineKey]) -> list[int]:
        """Remove engines and put their unfinished pieces in front of the queue, in order; returns these pieces."""
        numbers = sorted(number for engine in engines for number in self.given.pop(engine, ()))
        for engine in engines:
            self.running_requests -= self._loads.pop(engine, 0)
            self.candidates.discard(engine)
            for of_engine in (self._sent, self._unstarted, self._asked):
                of_engine.pop(engine, None)
        for number in numbers:
            self.pieces[number].engine = None
        self.requeue(numbers, first=True)
        return numbers

    def assign(self) -> dict[EngineKey, list[int]]:
        """Assign queued pieces; returns their numbers by engine.

        With `room`, the result has an empty list for an engine with unfinished work that is given nothing, because it
        has no room or the queue is empty. Such an engine is not a candidate until its next report.
        """
        given: dict[EngineKey, list[int]] = {}
        most = self._max_requests()
        while self.queue and (engine := self._least_loaded()) is not None:
            number = self.queue[0]
            requests = self.pieces[number].num_requests
            numbers = given.setdefault(engine, [])
            if self.given[engine] and (self._loads[engine] + requests > most or self._is_out_of_threads(engine)):
                # The entry in the heap stays; `_least_loaded` drops entries of engines that are no candidates.
                self.candidates.discard(engine)
                continue
            numbers.append(self.queue.popleft())
            self.pieces[number].engine = engine
            self.given[engine].add(number)
            self._sent[engine] = self._sent.get(engine, 0) + requests
            self._set_load(engine, self._loads[engine] + requests)
            self.running_requests -= requests  # moved from the queue to the load
        if self._room is not None:
            self._note_given(given)
        return given

    def steal(self) -> list[tuple[EngineKey, int]]:
        """Choose engines that must give up unstarted requests, and mark them. Returns (engine, free slots of the
        candidate that waits for requests), engines with the most unstarted requests first: at most one per candidate,
        and none that has a steal in progress."""
        if self.queue or len(self.candidates) <= len(self._asked) or not self._may_steal():
            return []
        steals: list[tuple[EngineKey, int]] = []
        loads = sorted((self._loads[engine], engine) for engine in self.candidates)
        # The steals in progress will supply as many candidates, the ones with the fewest requests.
        candidates = iter(loads[len(self._asked) :])
        while (victim := self._top_victim()) is not None and (candidate := next(candidates, None)) is not None:
            heapq.heappop(self._victims)
            self._asked[victim] = 0
            steals.append((victim, max(0, self._slots - candidate[0])))
        return steals

    def gave_up(self, engine: EngineKey, ends: Sequence[tuple[int, int]], unstarted: int) -> int:
        """Process an engine's answer to a steal. `ends` has (piece, response at which it ends now) of each shortened
        piece; `unstarted` is the number of unstarted requests that the engine has left. The cut-off responses become
        new pieces in front of the queue. Returns their number."""
        rests = [self._split(number, end) for number, end in ends]
        for rest in rests:
            self.requeue([rest], first=True)
        # Requests given since the steal began are not in the engine's count and may be unstarted too.
        self._set_unstarted(engine, unstarted + self._asked.pop(engine))
        return sum(self.pieces[rest].num_requests for rest in rests)

    def _max_requests(self) -> float:
        """Return the maximum number of requests of an engine with several pieces."""
        if self._room is None:
            return math.inf
        even_share = -(-self.running_requests // max(1, len(self.given)))
        return max(self._room, even_share) if self._steals else self._room

    def _is_out_of_threads(self, engine: EngineKey) -> bool:
        # An engine has `room` threads and one piece per thread (TaskRunner). It would not start the requests of further
        # pieces, and could not give them up either.
        return self._room is not None and len(self.given[engine]) >= self._room

    def _split(self, number: int, end: int) -> int:
        """End a piece before response `end`, which may leave it empty; returns the number of the new piece with the
        rest."""
        piece = self.pieces[number]
        assert piece.first <= end < piece.last, f"{piece} has no response {end}"
        rest = self._new(piece.task, end, piece.last)
        piece.last = end
        # The engine had not started any response of the piece, so it has nothing to finish.
        if not piece.num_requests:
            self.finished(number)
            self._of_task[piece.task].remove(number)
            del self.pieces[number]
        return rest

    def _new(self, task: int, first: int, last: int) -> int:
        number, self._num_added = self._num_added, self._num_added + 1
        self.pieces[number] = TaskPiece(task, first, last)
        self._of_task.setdefault(task, []).append(number)
        return number

    def _make_candidate(self, engine: EngineKey, load: int) -> None:
        self.given.setdefault(engine, set())
        self.candidates.add(engine)
        self._set_unstarted(engine, 0)
        self._set_load(engine, load)

    def _set_load(self, engine: EngineKey, load: int) -> None:
        self.running_requests += load - self._loads.get(engine, 0)
        self._loads[engine] = load
        heapq.heappush(self._heap, (load, engine))
        if len(self._heap) > MAX_ENTRIES_PER_ENGINE * len(self.given):
            # A sorted list is a heap.
            self._heap = sorted((self._loads[each], each) for each in self.candidates)

    def _least_loaded(self) -> EngineKey | None:
        """Return the serving candidate with the fewest requests, or None."""
        while self._heap:
            load, engine = self._heap[0]
            if engine in self.candidates and self._loads[engine] == load:
                if self._serves(engine):
                    return engine
                self.candidates.discard(engine)
            heapq.heappop(self._heap)
        return None

    def _note_given(self, given: dict[EngineKey, list[int]]) -> None:
        """Remove candidates that were given pieces and, if nothing is left to give, those with unfinished work."""
        for engine, numbers in given.items():
            requests = sum(self.pieces[number].num_requests for number in numbers)
            if engine in self._asked:
                self._asked[engine] += requests
            self._set_unstarted(engine, self._unstarted[engine] + requests)
        # Their reports could not lead to new pieces, so let these engines finish everything before they report again.
        if not self.queue and not self._may_steal():
            for engine in self.candidates - given.keys():
                if self.given[engine]:
                    given[engine] = []
        self.candidates -= given.keys()

    def _may_steal(self) -> bool:
        return self._steals and (bool(self._asked) or self._top_victim() is not None)

    def _top_victim(self) -> EngineKey | None:
        """Return the engine that may have the most unstarted requests among engines without a steal in progress."""
        while self._victims:
            unstarted, engine = self._victims[0]
            if self._unstarted.get(engine) == -unstarted and engine not in self._asked:
                return engine
            heapq.heappop(self._victims)
        return None

    def _set_unstarted(self, engine: EngineKey, unstarted: int) -> None:
        self._unstarted[engine] = unstarted
        if unstarted:
            heapq.heappush(self._victims, (-unstarted, engine))
