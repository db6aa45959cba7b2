"""Group of teachers on ranks of their own: shares of work by rank, and scores by data-parallel rank of the actor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from mcore_rl.config.models import TeacherConfig, TeacherSourceConfig
from mcore_rl.data.packing import TOKENS
from mcore_rl.runtime.phases import Stages
from mcore_rl.runtime.roles.base import SetUpContext
from mcore_rl.runtime.roles.critic import CriticGroup
from mcore_rl.runtime.roles.groups import RankMap
from mcore_rl.runtime.roles.judge import JudgeGroup
from mcore_rl.runtime.roles.reward_model import RewardModelGroup
from mcore_rl.runtime.roles.teacher import TeacherGroup
from mcore_rl.runtime.roles.teacher_ranks import TeacherRankGroup, TeacherRankProcess, teacher_ranks_role
from mcore_rl.runtime.spans import SpanRecorder
from mcore_rl.runtime.trajectory_store import FetchRequest
from mcore_rl.types import RankShares, ScoreColumn, TokenScores
from tests.unit.runtime.made import EndedWatch
from tests.unit.runtime.test_teacher_group import batch

PAIRS = RankMap((0, 0, 1, 1), (1, 3))
"""Two data-parallel ranks with two peers each; the second peer reports."""


@dataclass
class Rank:
    """Handle of a fake process, and its actor. `fetch` returns the rows; the reference of a column is (rank, [(sample,
    row)])."""

    number: int
    calls: list[str] = field(default_factory=list)

    @property
    def actor(self) -> Any:
        methods = ("score", "setup_teacher", "free_address", "fetch")
        return SimpleNamespace(**{name: SimpleNamespace(remote=getattr(self, name)) for name in methods})

    def call(self, method: Callable[..., object], *arguments: object) -> object:
        return getattr(self, method.__name__)(*arguments)

    call_for_two = call

    def free_address(self) -> str:
        return f"tcp://{self.number}"

    def setup_teacher(self, context: SetUpContext, *given: object) -> tuple[object, ...]:
        self.calls.append("setup_teacher")
        return (self.number, context.visible_devices, *given)

    def score(self, share: RankShares, readers: dict[int, np.ndarray], *rows: list[int]) -> dict[int, Any]:
        assert len(rows) <= 1
        self.calls.append("score")
        row_of = {int(each["samples"]): rows[0][each["rows"]] for each in share.table}
        assert sorted(row_of) == sorted(np.concatenate([*readers.values(), np.empty(0, int)]).tolist())
        return {reader: (self.number, [(s, row_of[s]) for s in own.tolist()]) for reader, own in readers.items()}

    def fetch(self, request: FetchRequest) -> tuple[None, list[int]]:
        return None, request.rows.tolist()


def group_of(teachers: int) -> tuple[TeacherRankGroup, list[Rank]]:
    """A group of teachers with four ranks each, on a node per rank, for an actor with three data-parallel ranks."""
    entries = [TeacherSourceConfig(f"s{number}", hf_path="x") for number in range(teachers)]
    role = teacher_ranks_role(TeacherConfig(by_source=entries, num_ranks=4), [PAIRS] * teachers, 3, TOKENS)
    assert (role.guests.num, role.guests.models) == (4 * teachers, teachers)
    ranks = [Rank(number) for number in range(4 * teachers)]
    made: Any = role.group(ranks, [*range(4 * teachers)], EndedWatch(), Stages())  # type: ignore[arg-type]
    return made, ranks


def test_scores_of_every_sample_reach_its_reader_once() -> None:
    group, ranks = group_of(1)
    columns = group.scores(batch([2, 0, 0, 2, 1, 0], [5, 5, 5, 5, 5, 5])).by_rank
    found = [[pair for _, pairs in of_rank for pair in pairs] for of_rank in columns]  # type: ignore[misc, attr-defined]
    assert [sorted(of_rank) for of_rank in found] == [[(1, 1), (2, 2), (5, 5)], [(4, 4)], [(0, 0), (3, 3)]]
    # Three samples per data-parallel rank of the teacher; only the peers that report return scores.
    reporting = [name for of_rank in columns for name, _ in of_rank]  # type: ignore[misc, attr-defined]
    assert set(reporting) == {1, 3}
    counts = {name: sum(len(p) for c in columns for other, p in c if other == name) for name in (1, 3)}  # type: ignore[misc, attr-defined]
    assert counts == {1: 3, 3: 3}
    assert [rank.calls for rank in ranks] == [["score"]] * 4


def test_teachers_score_samples_of_their_sources() -> None:
    group, ranks = group_of(3)
    columns = group.scores(batch([0, 0, 0, 1], [5, 5, 5, 5], [2, -1, 0, 2])).by_rank
    # Each of the two samples of teacher 2 is on one of its data-parallel ranks.
    assert columns == (((3, [(2, 2)]), (9, [(0, 0)])), ((11, [(3, 3)]),), ())
    # All ranks of a teacher take part, even without samples, and no rank of a teacher without samples does.
    assert [len(rank.calls) for rank in ranks] == [1] * 4 + [0] * 4 + [1] * 4


@pytest.mark.parametrize("on_gpus", [True, False])
def test_set_up_on_gpus_begins_a_teacher_after_the_one_before(monkeypatch: pytest.MonkeyPatch, on_gpus: bool) -> None:
    group, ranks = group_of(2)
    awaited: list[tuple[int, list[int]]] = []
    """Set-ups that were awaited, and the ranks whose set-up had not begun."""

    def wait(watch: object, starts: dict[tuple[int, ...], object]) -> None:
        awaited.append((len(starts), [rank.number for rank in ranks if "setup_teacher" not in rank.calls]))

    monkeypatch.setattr(EndedWatch, "get_started", wait, raising=False)
    devices = [str(device) if on_gpus else None for device in range(8)]
    starts: Any = group.set_up(SetUpContext(None, {}), devices)  # type: ignore[arg-type]
    wanted = [(rank, devices[rank], rank // 4, rank % 4, 4, f"tcp://{rank // 4 * 4}") for rank in range(8)]
    assert list(starts) == wanted
    assert awaited == ([(4, [4, 5, 6, 7])] if on_gpus else [])


@pytest.mark.parametrize(
    "method",
    [
        *(TeacherRankGroup.scores, TeacherGroup.scores, RewardModelGroup.score, JudgeGroup.score),
        *(CriticGroup.values, CriticGroup.update),
    ],
)
def test_models_beside_the_policy_compute_after_trainers_free_caches(method: Callable[..., object]) -> None:
    def free() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        method(
            SimpleNamespace(stages=Stages(free_cache=free)), *([None] * (method.__wrapped__.__code__.co_argcount - 1))
        )


@pytest.mark.parametrize("reports", [True, False])
def test_process_returns_a_column_per_reader(monkeypatch: pytest.MonkeyPatch, reports: bool) -> None:
    monkeypatch.setattr(ray, "put", lambda column: column)
    process = TeacherRankProcess.__new__(TeacherRankProcess)
    process.name, process.spans = "teacher rank 0", SpanRecorder("teacher rank 0")
    scores = {sample: TokenScores(np.full(2, -sample, np.float32)) for sample in (3, 5, 8)}
    process.model = SimpleNamespace(scores=lambda share, chunks: scores, reports=reports)  # type: ignore[assignment]
    share: Any = SimpleNamespace(by_update=lambda: [None])
    found: Any = process.score(share, {0: np.array([8, 3]), 2: np.array([5])})
    columns: dict[int, ScoreColumn] = found
    samples = {reader: column.samples.tolist() for reader, column in columns.items()}
    assert samples == ({0: [8, 3], 2: [5]} if reports else {})
    assert all((column.by_sample()[s].logp == -s).all() for column in columns.values() for s in column.samples.tolist())
