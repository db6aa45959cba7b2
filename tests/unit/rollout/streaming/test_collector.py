"""Groups submitted ahead of their training: selection, timing and age."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.rollout.streaming.collector import StreamingCollector, SwappingPublisher
from mcore_rl.types import Groups, Max, Mean, RolloutResult, RolloutTask
from tests.unit.rollout.made import drawn_and_dropped
from tests.unit.rollout.streaming.streamed import SAMPLES, SIZE, Stream, all_of_them, collector_of, some


def trained(groups: Groups) -> list[int]:
    """Return the ids of the trained groups."""
    pairs = zip(groups.scalars, groups.keep, strict=True)
    return [int(scalars.group_ids[0]) for scalars, keep in pairs if len(keep)]


def ages(groups: Groups, version: int) -> list[int]:
    pairs = zip(groups.scalars, groups.keep, strict=True)
    return [version - int(scalars.versions[0, 0]) for scalars, keep in pairs if len(keep)]


def run(collector: StreamingCollector, stream: Stream, steps: int) -> list[Groups]:
    """Run steps like the trainer: engines continue while it trains."""
    collected = []
    collector.published(0)
    for step in range(1, steps + 1):
        collected.append(collector.collect(step))
        if stream.underway:
            stream.end(stream.choose(sorted(stream.underway)))
        stream.version = step
        collector.published(step)
    return collected


class Board:
    """Board that records the finished part, and None at the end."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float] | None] = []

    def update(self, work: str, done: float, total: float, unit: str) -> None:
        self.seen.append((done, total))

    def end(self, work: str) -> None:
        self.seen.append(None)


def test_collector_shows_finished_groups_while_it_waits(tmp_path: Path) -> None:
    stream, board = Stream(lambda tickets: tickets[:1]), Board()
    collector = collector_of(stream, tmp_path, board=board)
    collector.published(0)
    collector.collect(1)
    assert board.seen == [*((done, SIZE) for done in range(SIZE)), None]


@pytest.mark.parametrize(("eta", "hard"), [(1, 1), (1, 3), (2, 2), (2, 4), (4, 6)])
@pytest.mark.parametrize("seed", range(2))
def test_collector_trains_every_group_once_within_the_bound(eta: int, hard: int, seed: int, tmp_path: Path) -> None:
    stream = Stream(some(seed), slots=SAMPLES * 6)
    collector = collector_of(stream, tmp_path, rollout={"max_staleness": eta, "max_staleness_hard": hard})
    collected = run(collector, stream, 50)
    of_steps = [trained(groups) for groups in collected]
    assert all(len(of_step) == SIZE for of_step in of_steps)
    assert sorted(group for of_step in of_steps for group in of_step) == list(range(50 * SIZE)), (
        "what is drawn is trained, and no more is drawn"
    )
    oldest = [max(ages(groups, version)) for version, groups in enumerate(collected)]
    assert max(oldest) <= hard
    assert [groups.metrics["staleness/max"] for groups in collected] == [Max(float(age)) for age in oldest]
    assert stream.most_requests <= stream.slots
    if eta == hard:  # first in, first out
        versions = [[int(s.versions[0, 0]) for s in groups.scalars] for groups in collected]
        assert versions == sorted(versions)


class ParkingStream(Stream):
    """Stream whose tasks are sampled in several pieces. After each piece they pause until the next version, or until
    their engine is idle, like rollout.partial_tokens."""

    def __init__(self, seed: int, **given: object) -> None:
        chance = random.Random(seed)
        super().__init__(lambda tickets: chance.sample(tickets, chance.randint(1, min(3, len(tickets)))), **given)
        self.left: dict[int, int] = {}
        self.parked: dict[int, int] = {}
        """Version with which the last piece of a ticket was sampled."""
        self.pieces_of = lambda: chance.choice([1, 1, 1, 2, 9])

    def begin(self, task: RolloutTask, results: dict[int, RolloutResult]) -> int:
        ticket = super().begin(task, results)
        assert task.tokens_per_version == 16
        self.left[ticket] = self.pieces_of()
        return ticket

    def wait(self) -> None:
        self.waits += 1
        running = [ticket for ticket in self.underway if self.parked.get(ticket) != self.version]
        assert self.underway, "it waits, and nothing is under way: it would wait for ever"
        for engine in range(self.num_engines):
            of_engine = [ticket for ticket in self.underway if ticket % self.num_engines == engine]
            if not set(of_engine).intersection(running):
                running += of_engine
        drawn = self.choose(sorted(running))
        for ticket in drawn:
            self.left[ticket] -= 1
            self.parked[ticket] = self.version
        self.end([ticket for ticket in drawn if not self.left[ticket]])


@pytest.mark.parametrize("waits_for", ["weights", "a checkpoint"])
@pytest.mark.parametrize(("eta", "hard"), [(1, 1), (1, 3), (2, 4)])
@pytest.mark.parametrize("seed", range(2))
def test_collector_paused_responses_block_no_step(
    eta: int, hard: int, seed: int, waits_for: str, tmp_path: Path
) -> None:
    stream = ParkingStream(seed, slots=SAMPLES * 6)
    stream.dull = lambda group: group % 4 == 0
    given = {"max_staleness": eta, "max_staleness_hard": hard, "partial_tokens": 16}
    dynamic = {"enable": True, "max_batches": 2}
    collector = collector_of(stream, tmp_path, steps=30, rollout=given, dynamic=dynamic)
    collector.published(0)
    for step in range(1, 31):
        assert max(ages(collector.collect(step), step - 1)) <= hard
        if waits_for == "a checkpoint":
            collector.settle()
            assert not stream.underway
        stream.version = step
        collector.published(step)
    assert max(stream.left.values()) == 0


def test_collector_number_of_groups_follows_max_staleness(tmp_path: Path) -> None:
    stream = Stream(lambda tickets: tickets[:SIZE])
    collector = collector_of(stream, tmp_path, rollout={"max_staleness": 2})
    collector.published(0)
    assert len(stream.begun) == 3 * SIZE
    collector.collect(1)
    stream.end(sorted(stream.underway))
    assert len(stream.begun) == 3 * SIZE, "what is in training exists"
    collector.published(1)
    assert len(stream.begun) == 4 * SIZE
    assert [task.version for task in stream.begun] == [0] * 3 * SIZE + [1] * SIZE


def test_collector_one_step_off_is_independent_of_timing(tmp_path: Path) -> None:
    """With rollout.swap=finish, groups may end in any order, also groups without signal."""
    outcomes = []
    for seed in range(6):
        stream = Stream(some(seed))
        stream.dull = lambda group: group % 3 == 0
        given = {"max_staleness": 1, "max_staleness_hard": 1, "swap": "finish"}
        collector = collector_of(stream, tmp_path, rollout=given, dynamic={"enable": True, "max_batches": 3})
        publisher = SwappingPublisher(FakePublisher(stream), collector)
        publisher.publish(0)
        steps: list[Any] = []
        for step in range(1, 12):
            groups = collector.collect(step)
            assert set(ages(groups, step - 1)) <= {0, 1}
            for scalars in groups.scalars:
                assert (scalars.versions[:, 0] == scalars.versions[:, 1]).all()
            drawn = [(int(s.group_ids[0]), int(s.prompt_rows[0])) for s in groups.scalars]
            steps.append((drawn, trained(groups)))
            stream.end(stream.choose(sorted(stream.underway)) if stream.underway else [])
            publisher.publish(step)
        outcomes.append(steps)
    assert all(outcome == outcomes[0] for outcome in outcomes)


class FakePublisher:
    def __init__(self, stream: Stream, *, may_run: bool = False) -> None:
        self.stream, self.may_run = stream, may_run

    def publish(self, version: int) -> int:
        assert self.may_run or not self.stream.underway, "weights change under responses"
        self.stream.version = version
        return version

    def verify(self) -> int:
        return 0


def test_collector_replaces_groups_without_signal(tmp_path: Path) -> None:
    checked: list[tuple[int, str]] = []

    class Failures:
        def check(self, graded: Any, what: str, records: str) -> None:
            assert (tmp_path / Path(records).name).exists()
            checked.append((len(graded), what))

    stream = Stream(all_of_them)
    stream.dull = lambda group: group % 2 == 0
    dynamic = {"enable": True, "max_batches": 4}
    groups = run(collector_of(stream, tmp_path, dynamic=dynamic, failures=Failures()), stream, 1)[0]
    assert checked == [(len(groups.scalars), "step 1")]
    assert trained(groups) == [1, 3, 5, 7]
    dropped = [int(s.group_ids[0]) for s, keep in zip(groups.scalars, groups.keep, strict=True) if not len(keep)]
    assert dropped
    assert all(group % 2 == 0 for group in dropped)
    assert drawn_and_dropped(groups) == (SIZE + len(dropped), len(dropped))
    recorded = (tmp_path / "step_1.jsonl").read_text().split()
    assert recorded == [str(group) for group in sorted([1, 3, 5, 7, *dropped])]


def test_collector_without_signal_fills_with_the_oldest(tmp_path: Path) -> None:
    stream = Stream(some(1))
    stream.dull = lambda group: group != 6
    collector = collector_of(stream, tmp_path, steps=3, dynamic={"enable": True, "max_batches": 2})
    collected = run(collector, stream, 3)
    assert trained(collected[0]) == [0, 1, 2, 6]
    # (max_batches - 1) steps' worth of groups leave the count; admission ends with 2 steps' worth without signal.
    assert drawn_and_dropped(collected[0])[0] == SIZE + 2 * SIZE
    assert all(len(trained(groups)) == SIZE for groups in collected)


def test_collector_validation_requests_count_as_slots(tmp_path: Path) -> None:
    stream = Stream(all_of_them, slots=3 * SAMPLES)
    stream.begin(RolloutTask("val", np.arange(1), np.arange(1), 2 * SAMPLES, Any, 0, str(tmp_path / "v")), {})
    collector = collector_of(stream, tmp_path)
    collector.published(0)
    assert len(stream.begun) == 1 + 1


def test_collector_scores_models_before_filtering(tmp_path: Path) -> None:
    stream, scored = Stream(lambda tickets: tickets[:1]), []
    dropped: list[RolloutTask] = []

    def score(tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[RolloutResult]:
        assert collecting, "what scores waits: it would do so in a wait of the trainer"
        scored.extend(int(task.group_ids[0]) for task in tasks)
        stream.end(sorted(stream.underway)[:1])  # while it waits for the model
        assert len(stream.begun) <= 2 * SIZE + len(dropped), "what is being scored exists"
        dropped.extend(task for task in tasks if task.group_ids[0] % 2)
        flat = [np.zeros(SAMPLES, np.float32) if int(task.group_ids[0]) % 2 else part.rewards
                for task, (_, part) in zip(tasks, results, strict=True)]  # fmt: skip
        return [(ref, replace(part, rewards=rewards)) for (ref, part), rewards in zip(results, flat, strict=True)]

    dynamic = {"enable": True, "max_batches": 4, "metric": "reward"}
    collector = collector_of(stream, tmp_path, dynamic=dynamic, score=score)
    collecting = False
    collector.published(0)
    stream.end([0, 1])
    assert scored == []
    collecting = True
    groups = collector.collect(1)
    assert trained(groups) == [0, 2, 4, 6]
    assert len(scored) == len(set(scored))


def test_collector_metrics_report_staleness(tmp_path: Path) -> None:
    stream = Stream(lambda tickets: tickets[:SIZE])
    collector = collector_of(stream, tmp_path, rollout={"max_staleness": 2})
    first, second, third = run(collector, stream, 3)
    assert first.metrics["staleness/mean"] == Mean(0.0, SIZE)
    # Groups of the second step ended while the first was trained; groups of the third ended with later weights.
    assert second.metrics["staleness/mean"] == Mean(4.0, SIZE)
    assert second.metrics["staleness/tokens_mean"] == Mean(float(SIZE * SAMPLES), SIZE * SAMPLES)
    assert third.metrics["staleness/mean"] == Mean(2.0 * SIZE, SIZE)
    assert third.metrics["staleness/tokens_mean"] == Mean(float(SIZE * SAMPLES), SIZE * SAMPLES)
    assert (second.metrics["staleness/mixed_fraction"].value, third.metrics["staleness/mixed_fraction"].value) == (0, 1)
    assert [third.metrics[f"staleness/groups_{age}"].value for age in range(3)] == [0, 0, 1]
    assert third.metrics["time/generator_idle"].value == 0.5
