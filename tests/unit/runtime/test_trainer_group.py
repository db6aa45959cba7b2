"""How many calls a step makes to the trainer ranks, and what each rank has in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mcore_rl.runtime.groups import RankMap, TrainerGroup
from mcore_rl.runtime.processes import TrainerProcess
from mcore_rl.types import Batch, Mean, RankShare, TokenColumn, Total

CHUNKS = ("chunk a", "chunk b")


class RecordedActor:
    """Stands for the rank's MegatronActor: notes each call with the samples, advantages and trajectories it is of."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def note(self, call: str, shares: list[RankShare], chunks: list[Any]) -> None:
        samples = [share.samples.tolist() for share in shares]
        advantages = [float(advantage) for share in shares for advantage in share.advantages]
        self.calls.append((call, samples, advantages, tuple(chunks)))

    def annotate(self, shares: list[RankShare], chunks: list[Any]) -> dict[str, Any]:
        self.note("annotate", shares, chunks)
        return {"annotated": Total(len(shares))}

    def refer(self, shares: list[RankShare], chunks: list[Any]) -> None:
        self.note("refer", shares, chunks)

    def estimate(self, estimator: Any, shares: list[RankShare], chunks: list[Any], values: Any) -> tuple[Any, Any]:
        self.note("estimate", shares, chunks)
        return {}, {}

    def penalize(self, shares: list[RankShare], chunks: list[Any], coefficient: float) -> tuple[Any, Any]:
        self.note("penalize", shares, chunks)
        return {}, {int(sample): coefficient for share in shares for sample in share.samples}

    def update(self, share: RankShare, chunks: list[Any], index: int) -> dict[str, Any]:
        self.note(f"update {index}", [share], chunks)
        return {"updated": Mean(1.0, 1)}

    def gather_parameters(self) -> None:
        self.calls.append(("gather",))


class Handle:
    """A rank as Ray shows it, in this process: a call runs at once, and its result is its own reference."""

    def __init__(self, rounds: list[str]) -> None:
        self.process = TrainerProcess.__ray_metadata__.modified_class("rank")
        self.process.actor = RecordedActor()
        self.rounds = rounds

    def __getattr__(self, name: str) -> Any:
        @dataclass
        class Method:
            remote: Any

        def call(*arguments: Any) -> Any:
            self.rounds.append(name)
            return getattr(self.process, name)(*arguments)

        return Method(call)


@dataclass
class Ready:
    """A Watch of calls that have run."""

    names: dict[Any, str] = field(default_factory=dict)

    def get(self, references: list[Any]) -> list[Any]:
        return list(references)


class Estimator:
    class needs:
        values = False


def make() -> tuple[TrainerGroup, list[str], list[list[tuple[Any, ...]]]]:
    """A group of two data-parallel ranks, the rounds of calls to them (one entry per rank), and what ran on each."""
    rounds: list[str] = []
    handles = [Handle(rounds), Handle(rounds)]
    group = TrainerGroup(handles, RankMap((0, 1), (0, 1)), Ready())  # type: ignore[arg-type]
    return group, rounds, [handle.process.actor.calls for handle in handles]


def batch(num_updates: int) -> Batch:
    """Of four samples; the first and the last lie on rank 0."""
    ints, numbers = np.zeros(4, np.int32), np.zeros(4, np.float32)
    return Batch(
        chunks=CHUNKS,
        chunk_ids=ints,
        rows=ints,
        group_ids=np.arange(4),
        total_tokens=ints + 5,
        trained_tokens=ints + 3,
        rewards=numbers,
        advantages=np.arange(4, dtype=np.float32),
        loss_weights=numbers,
        dp_ranks=np.array([0, 1, 1, 0], np.int32),
        updates=tuple(np.split(np.arange(4), num_updates)),
    )


def test_a_batch_of_one_update_is_one_call() -> None:
    group, rounds, ranks = make()
    one = batch(1)
    assert group.annotate(one) == {}
    assert group.update(one) == {"annotated": Total(2), "updated": Mean(2.0, 2)}
    assert rounds == ["update"] * 2
    first, second = [0, 3], [1, 2]
    for calls, samples in zip(ranks, (first, second), strict=True):
        advantages = [float(sample) for sample in samples]
        assert calls == [
            ("annotate", [samples], advantages, CHUNKS),
            ("update 0", [samples], advantages, CHUNKS),
            ("gather",),
        ]


def test_a_batch_of_several_comes_with_the_annotation() -> None:
    group, rounds, ranks = make()
    two = batch(2)
    assert group.annotate(two) == {"annotated": Total(4)}
    assert group.update(two) == {"updated": Mean(4.0, 4)}
    assert rounds == ["annotate"] * 2 + ["update"] * 2
    assert [call[:2] for call in ranks[0]] == [
        ("annotate", [[0], [3]]),
        ("update 0", [[0]]),
        ("update 1", [[3]]),
        ("gather",),
    ]


def test_a_batch_comes_once_with_whatever_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenColumn, "of", lambda found: found)
    group, rounds, ranks = make()
    one = batch(1)
    group.annotate(one)
    assert group.refer(one) == {"annotated": Total(2)}
    group.estimate(one, Estimator, None)
    assert group.update(one) == {"updated": Mean(2.0, 2)}
    assert rounds[::2] == ["annotate", "refer", "estimate", "update"]
    assert [call[0] for call in ranks[1]] == ["annotate", "refer", "estimate", "update 0", "gather"]


def test_other_advantages_reach_the_update_and_nothing_is_annotated_again() -> None:
    group, rounds, ranks = make()
    one = batch(1)
    group.annotate(one)
    group.refer(one)
    _, penalties = group.penalize(one, 0.5)
    assert penalties.tolist() == [0.5] * 4
    group.update(group.replace_advantages(one, one.advantages + 10))
    assert rounds[::2] == ["annotate", "refer", "penalize", "replace_shares", "update"]
    assert ranks[1][-2] == ("update 0", [[1, 2]], [11.0, 12.0], CHUNKS)


def test_every_batch_is_annotated_once_of_its_own() -> None:
    group, _, ranks = make()
    one, two = batch(1), batch(2)
    for made in (one, two, batch(1), one):
        group.annotate(made)
        group.update(made)
    assert [call[0] for call in ranks[0]].count("annotate") == 4
