"""Rewards of models in addition to rules: sums, accuracies and records, compared with values computed by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.data.records import amend_part
from mcore_rl.rollout.scored_pool import ScoredPool, WeightedScorer
from mcore_rl.types import Grades, RolloutScalars, RolloutTask, SamplingOptions
from tests.unit.rollout.made import made_scalars


def task(name: str, groups: list[int]) -> RolloutTask:
    ids = np.array(groups, np.int64)
    return RolloutTask("train", ids, ids, 2, SamplingOptions(4), 1, name)


def scalars(rewards: list[float], accuracies: list[float]) -> RolloutScalars:
    values = {"rewards": np.array(rewards, np.float32), "accuracies": np.array(accuracies, np.float32)}
    return made_scalars(np.repeat(np.arange(len(rewards) // 2), 2), seconds_grading=2.0, **values)


class RulesPool:
    """Pool with the results of two tasks; records its calls of `amend`."""

    num_engines = 3

    def __init__(self) -> None:
        self.results = [("chunk a", scalars([1, 0], [1, 0])), ("chunk b", scalars([0, 1, 0, 1], [0, 1, 0, 1]))]
        self.amended: list[tuple[Any, Any]] = []

    def run(self, tasks: Sequence[RolloutTask]) -> list[tuple[Any, RolloutScalars]]:
        return self.results

    def amend(self, tasks: Sequence[RolloutTask], results: Sequence[tuple[Any, RolloutScalars]]) -> None:
        self.amended = list(zip(tasks, results, strict=True))


class FixedScorer:
    def __init__(self, *scores: list[float]) -> None:
        self.scores = scores
        self.seen: list[Any] = []

    def score(self, tasks: Sequence[Any], results: Sequence[tuple[Any, RolloutScalars]]) -> list[np.ndarray]:
        self.seen = [
            (task.records, chunk, result.rewards.tolist()) for task, (chunk, result) in zip(tasks, results, strict=True)
        ]
        return [np.array(own, np.float32) for own in self.scores]


TASKS = [task("a", [0]), task("b", [1, 2])]


def test_scored_pool_reward_is_the_weighted_sum() -> None:
    pool = RulesPool()
    model, judge = FixedScorer([10, 20], [1, 2, 3, 4]), FixedScorer([4, 8], [0, 0, 4, 4])
    scored = ScoredPool(pool, {"model": WeightedScorer(model, 0.5), "judge": WeightedScorer(judge, -0.25)}, True)
    (chunk, first), (_, second) = scored.run(TASKS)
    assert chunk == "chunk a"
    assert first.rewards.tolist() == [1 + 5 - 1, 0 + 10 - 2]
    assert second.rewards.tolist() == [0.5, 2, 0.5, 2]
    assert first.rewards.dtype == np.float32
    assert {name: own.tolist() for name, own in second.scores.items()} == {"model": [1, 2, 3, 4], "judge": [0, 0, 4, 4]}
    assert scored.num_engines == 3
    # Models receive the rewards of rules only; records and grading time include the models.
    assert judge.seen == [("a", "chunk a", [1, 0]), ("b", "chunk b", [0, 1, 0, 1])]
    assert pool.results[0][1].rewards.tolist() == [1, 0]
    assert [(own.records, result) for own, (_, result) in pool.amended] == [("a", first), ("b", second)]
    assert first.seconds_grading > 2.0


@pytest.mark.parametrize(("has_rules", "accuracies"), [(True, [1, 0]), (False, [3, 4])])
def test_scored_pool_accuracy_depends_on_rules(has_rules: bool, accuracies: list[float]) -> None:
    pool = RulesPool()
    pool.results = [("a", scalars([0, 0], [1, 0]))]
    scored = ScoredPool(pool, {"model": WeightedScorer(FixedScorer([3, 4]), 1.0)}, has_rules)
    assert scored.run(TASKS[:1])[0][1].accuracies.tolist() == accuracies


def test_scored_pool_wrong_number_of_scores_is_rejected() -> None:
    scored = ScoredPool(RulesPool(), {"model": WeightedScorer(FixedScorer([1], [1, 2, 3, 4]), 1.0)}, True)
    with pytest.raises(AssertionError, match=r"model: \(1,\) scores for \(2,\)"):
        scored.run(TASKS)


class LaterPool(RulesPool):
    """Pool with rewards 5, 6, ... over both tasks; the last response of the second task could not be graded."""

    def grade(self, tasks: Sequence[RolloutTask], results: Sequence[tuple[Any, RolloutScalars]]) -> list[Grades]:
        assert [result.rewards.tolist() for _, result in results] == [[1, 0], [0, 1, 0, 1]]
        first, second = np.array([5, 6], np.float32), np.array([7, 8, 9, 0], np.float32)
        failed = Grades(second, second / 10, ((3, "no"),), {"of": np.full(4, 6.0)}, "Traceback")
        return [Grades(first, first / 10), failed]


def test_step_grading_precedes_scoring() -> None:
    pool, model = LaterPool(), FixedScorer([10, 20], [1, 2, 3, 4])
    scored = ScoredPool(pool, {"model": WeightedScorer(model, 1.0)}, True, grades_step=True)
    (_, first), (chunk, second) = scored.run(TASKS)
    assert model.seen == [("a", "chunk a", [5, 6]), ("b", "chunk b", [7, 8, 9, 0])]
    assert (chunk, first.rewards.tolist(), second.rewards.tolist()) == ("chunk b", [15, 26], [8, 10, 12, 4])
    assert second.accuracies == pytest.approx([0.7, 0.8, 0.9, 0])
    assert (second.errors, second.traceback, second.parts["of"].tolist()) == (((3, "no"),), "Traceback", [6] * 4)
    assert pool.amended[1][1][1] is second
    together = ScoredPool(LaterPool(), {}, True, grades_step=True)
    [(_, alone), _] = together.run(TASKS)
    assert alone.rewards.tolist() == [5, 6]
    assert alone.seconds_grading > 2.0
    assert together.pool.amended[0][1][1] is alone  # type: ignore[attr-defined]
    assert together.num_engines == 3


def test_amend_records_keeps_lines_with_final_rewards(tmp_path: Path) -> None:
    part = tmp_path / ".step_1.0.0.part"
    lines = [{"response": "né\n", "reward": 1.0, "accuracy": 1.0, "tokens": 3}, {"response": "b", "reward": 0.0}]
    part.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    scores = {"model": np.array([4, 8], np.float32)}
    amend_part(str(part), np.array([3, 4], np.float32), np.array([1, 0], np.float32), scores)
    first, second = (json.loads(line) for line in part.read_text(encoding="utf-8").splitlines())
    assert first == {"response": "né\n", "reward": 3.0, "accuracy": 1.0, "tokens": 3, "scores": {"model": 4.0}}
    assert second == {"response": "b", "reward": 4.0, "accuracy": 0.0, "scores": {"model": 8.0}}
    assert [path.name for path in tmp_path.iterdir()] == [part.name]
