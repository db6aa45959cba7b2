"""Group of teachers on engines or servers: settings of engines, shares of work, and scores by data-parallel rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from tiny_checkpoint import tiny_fields

from mcore_rl.config.models import ModelConfig, TeacherConfig, TeacherSourceConfig
from mcore_rl.config.schema import Config
from mcore_rl.errors import McoreRLError, TeacherError
from mcore_rl.runtime.phases import Stages
from mcore_rl.runtime.roles.teacher import (
    ScoredSamples,
    TeacherGroup,
    TeacherProcess,
    _wanted,
    assign,
    engine_settings,
)
from mcore_rl.runtime.spans import SpanRecorder
from mcore_rl.runtime.trajectory_store import FetchRequest
from mcore_rl.types import Batch, ScoreColumn, TokenScores, TokenSequence, TrajectoryBuffers
from tests.unit.rollouts import batch_of
from tests.unit.runtime.made import EndedWatch, chunk


@dataclass
class Teacher:
    """Handle of a fake process. `fetch` returns the rows; the reference of a column is (teacher, [(sample, row)])."""

    name: int
    calls: list[list[ScoredSamples]] = field(default_factory=list)

    def call(self, method: Callable[..., object], *arguments: object) -> object:
        return getattr(self, method.__name__)(*arguments)

    call_for_two = call

    def score(self, parts: list[ScoredSamples], rows: list[int]) -> list[Any]:
        self.calls.append(parts)
        return [
            (self.name, part.teacher, [(s, rows[r]) for s, r in zip(part.samples.tolist(), part.rows, strict=True)])
            for part in parts
        ]

    def fetch(self, request: FetchRequest) -> tuple[None, list[int]]:
        return None, request.rows.tolist()


def batch(dp_ranks: list[int], tokens: list[int], teachers: list[int] | None = None) -> Batch:
    """A batch of one chunk whose response b is row b."""
    size = len(dp_ranks)
    made = batch_of([0] * size)
    columns = {"total_tokens": np.array(tokens, np.int32), "trained_tokens": np.ones(size, np.int32)}
    columns |= {"dp_ranks": np.array(dp_ranks, np.int32), "rows": np.arange(size, dtype=np.int32)}
    columns |= {"chunk_ids": np.zeros(size, np.int32)}
    numbers = None if teachers is None else np.array(teachers, np.int32)
    updates = (np.arange(0, size, 2), np.arange(1, size, 2), np.arange(0, size, 2))
    return replace(made, chunks=(chunk("maker", None, 0),), updates=updates, teachers=numbers, **columns)


def scores(given: Batch, processes: int, per_teacher: int) -> tuple[list[list[tuple[int, int, list[int]]]], list[Any]]:
    """Return (process, teacher, samples) of the columns of each rank, after a check of their rows."""
    teachers = [Teacher(number) for number in range(processes)]
    group = TeacherGroup(teachers, EndedWatch(), Stages(), per_teacher, num_dp_ranks=3)  # type: ignore[arg-type]
    by_rank = []
    for columns in group.scores(given).by_rank:
        by_rank.append([(name, teacher, [sample for sample, _ in found]) for name, teacher, found in columns])  # type: ignore[misc, attr-defined]
        assert all(sample == row for _, _, found in columns for sample, row in found)  # type: ignore[misc, attr-defined]
    return by_rank, [teacher.calls for teacher in teachers]


def test_scores_reach_the_rank_of_each_sample_once() -> None:
    by_rank, calls = scores(batch([2, 0, 0, 2, 1, 0], [5, 5, 5, 5, 5, 5]), processes=2, per_teacher=2)
    assert by_rank == [[(0, 0, [1, 2, 5])], [(1, 0, [4])], [(1, 0, [0, 3])]]
    assert [len(of_process) for of_process in calls] == [1, 1]  # one call for all parts


def test_scores_of_sources_come_from_their_engines_only() -> None:
    by_rank, _ = scores(batch([0, 0, 0, 1], [5, 5, 5, 5], [1, -1, 0, 1]), processes=4, per_teacher=2)
    assert by_rank == [[(1, 0, [2]), (2, 1, [0])], [(3, 1, [3])], []]


def test_scores_of_servers_come_from_one_client() -> None:
    by_rank, calls = scores(batch([0, 0, 1], [5, 5, 5], [1, 0, 1]), processes=1, per_teacher=0)
    assert by_rank == [[(0, 0, [1]), (0, 1, [0])], [(0, 1, [2])], []]
    assert len(calls[0]) == 1


def test_assign_balances_tokens_and_skips_untrained_responses() -> None:
    given = batch([0, 0, 0, 0, 0], [10, 10, 10, 30, 7])
    given = replace(given, trained_tokens=np.array([1, 1, 1, 1, 0], np.int32))
    assert assign(given, np.zeros(5, np.int32), 2).tolist() == [0, 0, 0, 1, -1]


@pytest.mark.parametrize(("kind", "has_routers"), [("qwen3", False), ("qwen3_moe", True)])
def test_engines_of_teachers_compute_in_float32_as_the_policy(kind: str, has_routers: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_fields(kind)))
    config = Config()
    config.teacher.hf_path = str(tmp_path)
    unset = engine_settings(config, 0, "teacher engine 0")
    assert (unset.float32_head, unset.float32_router) == (False, False)
    config.model = ModelConfig("policy", dtype="bfloat16", float32_head=True, float32_router=True)
    found = engine_settings(config, 0, "teacher engine 0")
    assert (found.float32_head, found.float32_router) == (True, has_routers)


def trajectories(temperatures: Any) -> TrajectoryBuffers:
    """A prompt of 2 tokens, and 4 tokens of which the second and the last are not trained."""
    zeros = np.zeros(4, np.float32)
    return TrajectoryBuffers(
        tokens=np.arange(10, 16, dtype=np.int32),
        token_offsets=np.array([0, 6]),
        prompt_tokens=np.array([2], np.int32),
        response_offsets=np.array([0, 4]),
        logp_rollout=zeros,
        versions=zeros.astype(np.int32),
        trained=np.array([1, 0, 1, 0], np.uint8),
        temperatures=temperatures,
    )


@pytest.mark.parametrize("temperatures", [None, np.float32(1), np.array([1, np.nan, 1, 5], np.float32)])
def test_wanted_ends_with_the_last_trained_token(temperatures: Any) -> None:
    sequence, trained = _wanted(trajectories(temperatures), 0)
    assert (sequence.token_ids.tolist(), sequence.start, trained.tolist()) == ([10, 11, 12, 13, 14], 2, [0, 2])


@pytest.mark.parametrize("temperatures", [np.array(0.7, np.float32), np.array([1, np.nan, 0.7, 1], np.float32)])
def test_wanted_rejects_another_temperature(temperatures: Any) -> None:
    with pytest.raises(McoreRLError, match=r"sampled at temperature 0\.7, and teachers on engines or servers"):
        _wanted(trajectories(temperatures), 0)


@dataclass
class Scorer:
    """Scorer whose results name it and the token: logp is 1000 x number + token, and token + 1 is the most probable."""

    number: int
    lengths: list[int] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)

    def score(self, sequences: list[TokenSequence], top_k: int) -> list[TokenScores]:
        self.lengths.append(len(sequences))
        self.prompts += [each.token_ids[: each.start].tolist() for each in sequences]
        found = []
        for each in sequences:
            tokens = each.token_ids[each.start :]
            ids = tokens[:, None] + 1 + np.arange(top_k, dtype=np.int32)
            found.append(TokenScores.of(1000 * self.number + tokens, ids, np.full(ids.shape, -9.0)))
        return found


def process_of(monkeypatch: pytest.MonkeyPatch, *scorers: Scorer) -> TeacherProcess:
    """A process without Ray, whose references are the columns."""
    process = TeacherProcess.__new__(TeacherProcess)
    entries = [TeacherSourceConfig(f"s{number}", url=f"http://{number}") for number in range(len(scorers))]
    process.name, process.spans = "teacher client", SpanRecorder("teacher client")
    process._config = Config(teacher=TeacherConfig(by_source=entries, top_k=2))
    process._vocab_size, process._scorers = 100, dict(enumerate(scorers))  # type: ignore[assignment]
    monkeypatch.setattr(ray, "put", lambda column: column)
    return process


def three_rows() -> TrajectoryBuffers:
    """Row r has the prompt token 1 and the response tokens 10 r + 10, 10 r + 11, ..., r + 1 of them, all trained."""
    zeros = np.zeros(6, np.float32)
    return TrajectoryBuffers(
        tokens=np.array([1, 10, 1, 20, 21, 1, 30, 31, 32], np.int32),
        token_offsets=np.array([0, 2, 5, 9]),
        prompt_tokens=np.ones(3, np.int32),
        response_offsets=np.array([0, 1, 3, 6]),
        logp_rollout=zeros,
        versions=zeros.astype(np.int32),
        trained=np.ones(6, np.uint8),
        temperatures=None,
    )


def test_process_scores_each_part_with_its_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    scorers = Scorer(0), Scorer(1)
    given = [(1, [7], [2]), (0, [3, 5], [0, 1]), (1, [4, 2], [1, 0]), (0, [9], [2])]
    parts = [ScoredSamples(number, np.array(samples), np.array(rows, np.int32)) for number, samples, rows in given]
    columns: list[ScoreColumn] = process_of(monkeypatch, *scorers).score(parts, three_rows())  # type: ignore[assignment]
    tokens = {0: [10], 1: [20, 21], 2: [30, 31, 32]}
    for (number, samples, rows), column in zip(given, columns, strict=True):
        found = column.by_sample()
        assert list(found) == samples
        for sample, row in zip(samples, rows, strict=True):
            assert found[sample].logp.tolist() == [1000 * number + token for token in tokens[row]]
            top_ids = found[sample].top_ids
            assert top_ids is not None
            assert top_ids.tolist() == [[token + 1, token + 2] for token in tokens[row]]
    assert [scorer.lengths for scorer in scorers] == [[3], [3]]  # one call for all parts of a teacher


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[3, 100]], r"returned token 100 among the most probable ones, and the policy has 100 tokens; set"),
        ([[3, 4], [-1, 3]], r"returned token -1 among the most probable ones, and the policy has 100 tokens; set"),
        ([[3, 4], [7, 7]], r"returned token 7 twice among the most probable ones of one place.*; set teacher\.in_loss"),
    ],
)
def test_process_rejects_ids_that_are_no_tokens(
    monkeypatch: pytest.MonkeyPatch, ids: list[list[int]], message: str
) -> None:
    scores = TokenScores.of(np.zeros(len(ids)), np.array(ids), np.full((len(ids), 2), -9.0))
    with pytest.raises(TeacherError, match=rf"^teacher\.by_source, s1: url=http://1 {message}"):
        process_of(monkeypatch, Scorer(0), Scorer(1))._check(1, scores)


def test_process_scores_responses_after_prompts_with_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    hints = {"hint_tokens": np.array([4, 5, 6], np.int32), "hint_offsets": np.array([0, 2, 2, 3])}
    scorer = Scorer(0)
    parts = [ScoredSamples(0, np.array([7, 8, 9]), np.array([2, 1, 0], np.int32))]
    (column,) = process_of(monkeypatch, scorer).score(parts, replace(three_rows(), **hints))
    assert scorer.prompts == [[6], [1], [4, 5]]
    assert {sample: scores.logp.tolist() for sample, scores in column.by_sample().items()} == {  # type: ignore[attr-defined]
        7: [30, 31, 32],
        8: [20, 21],
        9: [10],
    }
