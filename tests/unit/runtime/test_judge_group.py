"""Group of judge engines: shares of work, scores and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.rewards.task_parts import TaskPart
from mcore_rl.runtime.phases import Stages
from mcore_rl.runtime.roles.judge import JudgeGroup
from mcore_rl.runtime.trajectory_store import FetchRequest
from mcore_rl.types import BuffersRef, Mean, Metric, RolloutScalars, RolloutTask, SamplingOptions
from tests.unit.rollouts import scalars_of
from tests.unit.runtime.made import EndedWatch, chunk


@dataclass
class Judge:
    """Handle of a fake judge process. `fetch` returns keys and rows."""

    scored: list[tuple[object, ...]] = field(default_factory=list)

    def call(self, method: Callable[..., object], *arguments: object) -> object:
        return getattr(self, method.__name__)(*arguments)

    call_for_two = call

    def score(self, given: Sequence[TaskPart], fetched: object) -> tuple[dict[int, float], dict[str, Metric]]:
        self.scored.append((given, fetched))
        parts = zip(fetched, given, strict=True)
        scores = {n: 10.0 * task + row for (task, _), part in parts for n, row in _numbered(part)}
        return scores, {"judge/unparsable_fraction": Mean(1, len(scores))}

    def fetch(self, request: FetchRequest) -> tuple[None, list[tuple[int, list[int]]]]:
        rows = np.split(request.rows, request.offsets[1:-1])
        return None, [(key, of_chunk.tolist()) for key, of_chunk in zip(request.keys.tolist(), rows, strict=True)]


def _numbered(part: TaskPart) -> list[tuple[int, int]]:
    return list(zip(part.numbers.tolist(), part.rows.tolist(), strict=True))


def given(prompt_set: str, sizes: Sequence[int]) -> tuple[list[RolloutTask], list[tuple[BuffersRef, RolloutScalars]]]:
    tasks, results = [], []
    for index, size in enumerate(sizes):
        ids = np.arange(size)
        tasks.append(RolloutTask(prompt_set, ids, ids, 1, SamplingOptions(4), 1))
        results.append((chunk("chunk", None, index), scalars_of(ids, 1)))
    return tasks, results


def group_of(num_judges: int) -> JudgeGroup:
    return JudgeGroup([Judge() for _ in range(num_judges)], EndedWatch(), Stages())  # type: ignore[arg-type]


def test_score_returns_scores_by_task() -> None:
    group = group_of(2)
    scores = group.score(*given("train", [3, 0, 2]))
    assert [own.tolist() for own in scores] == [[0, 1, 2], [], [20, 21]]
    calls = [call for judge in group.processes for call in judge.scored]
    assert len(calls) == 2
    for of_judge, fetched in calls:
        assert [part.rows.tolist() for part in of_judge] == [rows for _, rows in fetched]


def test_score_does_not_call_a_judge_without_work() -> None:
    group = group_of(3)
    group.score(*given("train", [1, 1]))
    assert sorted(len(judge.scored) for judge in group.processes) == [0, 1, 1]


def test_take_metrics_has_training_responses_only() -> None:
    group = group_of(2)
    group.score(*given("train", [4]))
    group.score(*given("val", [6]))
    group.score(*given("train", [2]))
    assert group.take_metrics() == {"judge/unparsable_fraction": Mean(4, 6)}
    assert group.take_metrics() == {}
