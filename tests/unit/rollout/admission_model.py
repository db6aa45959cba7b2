"""Model of asynchronous rollouts and their trainer, for tests of the admission rules.

It has no engines, threads or time: a system offers all possible next moves, and a test may choose any. It calls the two
rules of `admission`; the history is recorded in a ledger that the rules never see.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from mcore_rl.rollout.admission import may_submit, take_batch

ENDLESS = 3000
"""Limit of moves, several times the longest schedule of the tests."""

Move = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    max_staleness: int
    max_staleness_hard: int
    groups_per_version: int
    samples_per_group: int
    engines: tuple[int, ...]
    """Slots of each engine."""
    max_batches: int = 0
    """The first max_batches * groups_per_version groups that end in a version may be rejected."""


@dataclass(frozen=True, eq=False)
class Group:
    number: int
    submitted: int


@dataclass(frozen=True)
class Batch:
    version: int
    groups: list[Group]
    passed_over: list[Group]
    """Finished groups that were not taken."""


@dataclass
class Ledger:
    submitted: list[Group] = field(default_factory=list)
    trained: list[Batch] = field(default_factory=list)
    rejected: list[Group] = field(default_factory=list)
    failed: list[Group] = field(default_factory=list)

    def copy(self) -> Ledger:
        return Ledger([*self.submitted], [*self.trained], [*self.rejected], [*self.failed])


@dataclass(frozen=True)
class Checkpoint:
    """State from which a run resumes. Groups in training count as finished, since their version has not ended."""

    version: int = 0
    finished: tuple[Group, ...] = ()
    running: tuple[Group, ...] = ()


class System:
    def __init__(self, shape: Shape, start: Checkpoint = Checkpoint(), ledger: Ledger | None = None) -> None:
        self.shape, self.version, self.ledger = shape, start.version, ledger or Ledger()
        self.finished, self.slots = list(start.finished), list(shape.engines)
        self.batch: Batch | None = None
        self.running: dict[Group, list[int | None]] = {g: [None] * shape.samples_per_group for g in start.running}
        """Engine of each unfinished request; None: it waits for a slot to start again."""
        self.closed, self.judged = False, 0
        self.saved = start, self.ledger.copy()
        self._place()

    def admits(self) -> bool:
        return may_submit(
            running=len(self.running),
            finished=len(self.finished),
            in_training=len(self.in_training),
            groups_per_version=self.shape.groups_per_version,
            max_staleness=self.shape.max_staleness,
            running_requests=self.num_requests,
            slots=sum(self.slots),
            samples_per_group=self.shape.samples_per_group,
        )

    def takes(self) -> list[int] | None:
        return take_batch(
            [group.submitted for group in self.finished],
            [group.submitted for group in self.running],
            version=self.version,
            groups_per_version=self.shape.groups_per_version,
            max_staleness_hard=self.shape.max_staleness_hard,
        )

    # What exists.

    @property
    def in_training(self) -> list[Group]:
        return self.batch.groups if self.batch else []

    @property
    def existing(self) -> list[Group]:
        return [*self.running, *self.finished, *self.in_training]

    @property
    def num_requests(self) -> int:
        return sum(len(engines) for engines in self.running.values())

    @property
    def free(self) -> list[int]:
        """Return the free slots of each engine."""
        free = list(self.slots)
        for engine in itertools.chain.from_iterable(self.running.values()):
            if engine is not None:
                free[engine] -= 1
        return free

    # Regular moves.

    def moves(
        self, order: Sequence[str] = ("submit", "take", "publish", "end"), *, youngest: bool = False
    ) -> list[Move]:
        """Return the possible moves; empty if the system is stuck. Running groups come in the order of submission."""
        found: dict[str, list[Move]] = {kind: [] for kind in order}
        if not self.closed and self.admits():
            found["submit"] = [self.submit]
        if self.batch:
            found["publish"] = [self.publish]
        elif self.takes() is not None:
            found["take"] = [self.take]
        filters = self.judged < self.shape.max_batches * self.shape.groups_per_version
        for group, engines in reversed(self.running.items()) if youngest else self.running.items():
            for engine in {engine for engine in engines if engine is not None}:
                found["end"].append(partial(self.end, group, engine))
                if filters and len(engines) == 1:
                    found["end"].append(partial(self.end, group, engine, rejected=True))
        return [move for moves in found.values() for move in moves]

    def submit(self) -> Group:
        """Start a group; each request goes to the engine with most free slots, even if none is free: limiting this is
        the rule's task."""
        group = Group(len(self.ledger.submitted), self.version)
        self.ledger.submitted.append(group)
        engines = self.running.setdefault(group, [])
        for _ in range(self.shape.samples_per_group):
            engines.append(self.free.index(max(self.free)))
        return group

    def end(self, group: Group, engine: int, *, rejected: bool = False) -> None:
        """End a request, and with its last request the group."""
        self.running[group].remove(engine)
        if not self.running[group]:
            del self.running[group]
            self.judged += 1
            (self.ledger.rejected if rejected else self.finished).append(group)
        self._place()

    def take(self) -> None:
        taken = self.takes()
        assert taken is not None
        groups = [self.finished[index] for index in taken]
        self.finished = [group for index, group in enumerate(self.finished) if index not in taken]
        self.batch = Batch(self.version, groups, list(self.finished))

    def publish(self) -> None:
        assert self.batch
        self.ledger.trained.append(self.batch)
        self.batch, self.judged, self.version = None, 0, self.version + 1

    # Failures.

    def mishap(self, kind: str, which: int) -> Self:
        """Let `which` group or engine fail. A resume creates a new system from a checkpoint."""
        if kind == "fail" and self.running:
            self.fail(list(self.running)[which % len(self.running)])
        elif kind == "die":
            self.die(which % len(self.slots), whole_groups=which % 2 == 0)
        elif kind == "save":
            self.saved = (
                Checkpoint(self.version, (*self.in_training, *self.finished), tuple(self.running)),
                self.ledger.copy(),
            )
        elif kind == "resume":
            return type(self)(self.shape, *self.saved)
        return self

    def fail(self, group: Group) -> None:
        """Lose a sample permanently; its group leaves the count."""
        del self.running[group]
        self.ledger.failed.append(group)
        self._place()

    def die(self, engine: int, *, whole_groups: bool) -> None:
        """Let an engine die: its requests, or all requests of their groups, start again elsewhere with their submission
        versions. Its slots disappear, unless no group would fit any more; then it restarts at once."""
        for group, engines in self.running.items():
            if engine in engines and whole_groups:
                self.running[group] = [None] * self.shape.samples_per_group
            else:
                self.running[group] = [None if at == engine else at for at in engines]
        if sum(self.slots) - self.slots[engine] >= self.shape.samples_per_group:
            self.slots[engine] = 0
        self._place()

    def _place(self) -> None:
        for engines in self.running.values():
            for index, engine in enumerate(engines):
                if engine is None and max(self.free) > 0:
                    engines[index] = self.free.index(max(self.free))


@dataclass(frozen=True)
class Schedule:
    choices: Sequence[int] = ()
    """Indices of the first moves among the possible ones; later moves are chosen at random."""
    order: Sequence[str] = ("submit", "take", "publish", "end")
    youngest: bool = False
    """Order the moves of running groups by age, youngest first; moves are sorted by `order`."""
    bias: float = 1.0
    """Preference for the first move in this order; higher values choose it more often."""
    seed: int = 0
    mishaps: Sequence[tuple[int, str, int]] = ()
    """(number of the move before which it happens, kind of failure, index of the affected group or engine)."""


def play(
    system: System, schedule: Schedule, versions: float, seen: Callable[[System], object] = lambda system: None
) -> System:
    """Make moves until `versions` are reached or no move is possible. `seen` receives every state."""
    chance = random.Random(schedule.seed)
    for number in range(ENDLESS):
        for _, kind, which in (mishap for mishap in schedule.mishaps if mishap[0] == number):
            system = system.mishap(kind, which)
        seen(system)
        moves = system.moves(schedule.order, youngest=schedule.youngest) if system.version < versions else []
        if not moves:
            return system
        drawn = int(len(moves) * chance.random() ** schedule.bias)
        moves[schedule.choices[number] % len(moves) if number < len(schedule.choices) else drawn]()
    raise AssertionError(f"goes on for ever, at version {system.version}")
