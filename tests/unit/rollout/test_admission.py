"""Admission rules on a model without engines, in any order: nothing deadlocks, is trained too late, or is lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.rollout.admission import may_submit, take_batch
from tests.unit.rollout.admission_model import Group, Move, Schedule, Shape, System, play

VERSIONS = 10


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    eta, samples = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    engines = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    engines[0] += max(0, samples - sum(engines))  # at least one group fits, often exactly one
    return Shape(
        max_staleness=eta,
        max_staleness_hard=eta + draw(st.integers(0, 4)),
        groups_per_version=draw(st.integers(1, 4)),
        samples_per_group=samples,
        engines=tuple(engines),
        max_batches=draw(st.integers(0, 3)),
    )


MISHAPS = st.tuples(st.integers(0, 100), st.sampled_from(["fail", "die", "save", "resume"]), st.integers(0, 63))
STRAGGLING = st.permutations(["submit", "take", "publish"]).map(lambda kinds: [*kinds, "end"])
"""Running requests end last; with the youngest first, old groups run as long as possible."""
SCHEDULES = st.builds(
    Schedule,
    choices=st.lists(st.integers(0, 63), max_size=20),
    order=STRAGGLING | st.permutations(["submit", "take", "publish", "end"]),
    youngest=st.booleans(),
    bias=st.sampled_from([1.0, 5.0, 100.0, math.inf]),
    seed=st.integers(0, 2**32),
    mishaps=st.lists(MISHAPS, max_size=8),
)


def trained(system: System) -> list[Group]:
    return [group for batch in system.ledger.trained for group in batch.groups]


def staleness(system: System) -> Counter[int]:
    return Counter(batch.version - group.submitted for batch in system.ledger.trained for group in batch.groups)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(shapes(), SCHEDULES)
def test_admission_random_events_train_groups_once_and_in_time(shape: Shape, schedule: Schedule) -> None:
    """Schedules are unfair: a move may be delayed until no other move is possible."""

    def require_bounds(system: System) -> None:  # also batches whose training is undone by a resume
        assert all(system.version - group.submitted <= shape.max_staleness_hard for group in system.in_training)
        assert len(system.existing) <= (shape.max_staleness + 1) * shape.groups_per_version
        assert min(system.free) >= 0

    system = play(System(shape), schedule, VERSIONS, require_bounds)
    assert system.version == VERSIONS
    system.closed = True  # no group starts any more; the existing groups are trained, except for an incomplete batch
    system = play(system, replace(schedule, mishaps=()), math.inf)
    assert not system.running
    assert not system.batch
    assert len(system.finished) < shape.groups_per_version
    ledger = system.ledger
    assert Counter(ledger.submitted) == Counter(trained(system) + ledger.rejected + ledger.failed + system.finished)
    assert max(staleness(system)) <= shape.max_staleness_hard
    for version, batch in enumerate(ledger.trained):
        assert batch.version == version
        assert len(batch.groups) == shape.groups_per_version
        assert max(g.submitted for g in batch.groups) <= min((g.submitted for g in batch.passed_over), default=version)


class Prompt(System):
    """System in which a group starts as soon as possible."""

    def moves(self, order: Sequence[str] = (), *, youngest: bool = False) -> list[Move]:
        return [self.submit] if self.admits() else super().moves(order, youngest=youngest)


@settings(max_examples=150, deadline=None)
@given(shapes(), SCHEDULES)
def test_take_batch_tightest_bound_trains_in_order(shape: Shape, schedule: Schedule) -> None:
    """With fewer groups, because slots are missing or some were rejected, there is time to let others overtake."""
    places = (shape.max_staleness + 1) * shape.groups_per_version * shape.samples_per_group
    shape = replace(shape, max_staleness_hard=shape.max_staleness, engines=(places,), max_batches=0)
    system = play(Prompt(shape), replace(schedule, mishaps=()), VERSIONS)
    versions = [v for batch in system.ledger.trained for v in sorted(group.submitted for group in batch.groups)]
    assert versions == sorted(versions)
    assert take_batch([1], [0], version=1, groups_per_version=1, max_staleness_hard=4) == [0]


def reference(finished: list[int], running: list[int], version: int, batch: int, hard: int) -> list[int] | None:
    """Definition of take_batch: for every v, at most (v + hard - version) * batch of the remaining groups were
    submitted at v or earlier, and none if this is negative."""
    if len(finished) < batch:
        return None
    taken = sorted(sorted(range(len(finished)), key=lambda index: finished[index])[:batch])
    left = [submitted for index, submitted in enumerate(finished) if index not in taken] + running
    for v in range(-1, version + 1):
        if sum(submitted <= v for submitted in left) > max(0, (v + hard - version) * batch):
            return None
    return taken


@settings(max_examples=600, deadline=None)
@given(
    finished=st.lists(st.integers(0, 5), max_size=12),
    running=st.lists(st.integers(0, 5), max_size=4),
    later=st.integers(0, 2),
    batch=st.integers(1, 4),
    hard=st.integers(0, 9),
)
def test_take_batch_equals_its_definition(
    finished: list[int], running: list[int], later: int, batch: int, hard: int
) -> None:
    version = max([*finished, *running], default=0) + later
    taken = take_batch(finished, running, version=version, groups_per_version=batch, max_staleness_hard=hard)
    assert taken == reference(finished, running, version, batch, hard)


def test_take_batch_many_groups_of_one_age_stay_in_order() -> None:
    taken = take_batch([3, 4] * 1000, (), version=4, groups_per_version=10, max_staleness_hard=10**6)
    assert taken == list(range(0, 20, 2))


def begins(**what_exists: int) -> bool:
    """Call may_submit with eta 1, 3 groups per version and 2 samples per group."""
    nothing = {"running": 0, "finished": 0, "in_training": 0, "running_requests": 0, "slots": 100}
    return may_submit(groups_per_version=3, max_staleness=1, samples_per_group=2, **(nothing | what_exists))


def test_may_submit_needs_slots_for_the_whole_group() -> None:
    assert begins(slots=2)
    assert not begins(slots=1)
    assert not begins(slots=0)
    assert begins(slots=9, running_requests=7)
    assert not begins(slots=9, running_requests=8)
    assert not begins(slots=9, running_requests=10)  # an engine has died


@pytest.mark.parametrize("place", ["running", "finished", "in_training"])
def test_may_submit_counts_groups_in_every_state(place: str) -> None:
    assert begins(**{place: 5})
    assert not begins(**{place: 6})
    each = {"running": 1, "finished": 1, "in_training": 1}
    assert begins(**each | {place: 3})
    assert not begins(**each | {place: 4})


@pytest.mark.parametrize("slots", [3, 1000])
def test_admission_zero_staleness_is_synchronous(slots: int) -> None:
    shape = Shape(0, 0, groups_per_version=4, samples_per_group=3, engines=(slots,))
    system = play(System(shape), Schedule(), 5)
    assert Counter(group.submitted for group in system.ledger.submitted) == dict.fromkeys(range(5), 4)
    assert staleness(system) == {0: 20}
