"""The driver's handle of judge engines: who gets what, and whose figures count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mcore_rl.rewards.judge.worker import Share
from mcore_rl.runtime.delivery import FetchRequest
from mcore_rl.runtime.roles.judge import JudgeGroup
from mcore_rl.types import BuffersRef, Mean, Metric, RolloutScalars, RolloutTask, SamplingOptions
from tests.unit.runtime.made import chunk


@dataclass
class Call:
    """A method of a process in this one."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def remote(self, given: Sequence[Share], fetched: Any) -> tuple[dict[int, float], dict[str, Metric]]:
        self.calls.append((given, fetched))
        scores = {int(n): 10.0 * share.task + row for share in given for n, row in _numbered(share)}
        return scores, {"judge/unparsable_fraction": Mean(1, len(scores))}


class Fetch:
    """What a judge fetches, in words."""

    @staticmethod
    def remote(wanted: FetchRequest) -> tuple[None, list[tuple[int, list[int]]]]:
        rows = np.split(wanted.rows, wanted.offsets[1:-1])
        return None, [(key, of_chunk.tolist()) for key, of_chunk in zip(wanted.keys.tolist(), rows, strict=True)]


@dataclass
class Handle:
    score: Call = field(default_factory=Call)
    fetch: Fetch = field(default_factory=Fetch)


class Waiting:
    dependent_seconds = 1.0

    def get(self, found: Sequence[Any], needs: Sequence[Any] = ()) -> list[Any]:
        return list(found)


def _numbered(share: Share) -> list[tuple[int, int]]:
    return list(zip(share.part.numbers.tolist(), share.part.rows.tolist(), strict=True))


def given(prompt_set: str, sizes: Sequence[int]) -> tuple[list[RolloutTask], list[tuple[BuffersRef, RolloutScalars]]]:
    tasks, results = [], []
    for index, size in enumerate(sizes):
        ids = np.arange(size)
        tasks.append(RolloutTask(prompt_set, ids, ids, 1, SamplingOptions(4), 1))
        ones, zeros = np.ones(size, np.int32), np.zeros(size, np.float32)
        scalars = RolloutScalars(
            ids, ids, ones, ones, ones, zeros, zeros, np.zeros(size, np.uint8), np.zeros((size, 2), np.int32)
        )
        results.append((chunk("chunk", None, index), scalars))
    return tasks, results


def group_of(num_judges: int) -> JudgeGroup:
    return JudgeGroup([Handle() for _ in range(num_judges)], Waiting())  # type: ignore[arg-type]


def test_scores_come_back_by_task_and_each_share_with_its_own_chunk() -> None:
    group = group_of(2)
    scores = group.score(*given("train", [3, 0, 2]))
    assert [own.tolist() for own in scores] == [[0, 1, 2], [], [20, 21]]
    calls = [call for handle in group.handles for call in handle.score.calls]
    assert len(calls) == 2
    for of_judge, fetched in calls:
        assert [(share.task, share.part.rows.tolist()) for share in of_judge] == fetched


def test_a_judge_without_work_is_not_called() -> None:
    group = group_of(3)
    group.score(*given("train", [1, 1]))
    assert sorted(len(handle.score.calls) for handle in group.handles) == [0, 1, 1]


def test_figures_are_those_of_training_since_they_were_last_taken() -> None:
    group = group_of(2)
    group.score(*given("train", [4]))
    group.score(*given("val", [6]))
    group.score(*given("train", [2]))
    assert group.take_figures() == {"judge/unparsable_fraction": Mean(4, 6)}
    assert group.take_figures() == {}
