"""Responses of several tasks, graded in one call of a user's function in grading processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.reward import OverlongConfig, RewardConfig
from mcore_rl.data.records import amend_part
from mcore_rl.rewards.step_grading import DeferredRewarder, StepGrader
from mcore_rl.rewards.task_parts import TaskPart, TranscriptReader
from mcore_rl.rollout.results import grades_of
from mcore_rl.rollout.trajectories import pack_trajectories
from mcore_rl.types import Prompt, Score, Trajectory, TrajectoryBuffers
from tests.unit.rewards.managers import running_manager

FUNCTIONS = """
def by_rank(data_sources, solution_strs, ground_truths, extra_infos, *, scale="1"):
    order = sorted(solution_strs, key=len)
    return [
        {"score": float(scale) * order.index(text) if text != "bad" else float("nan"), "of": len(order), "truth": truth}
        for text, truth in zip(solution_strs, ground_truths)
    ]
"""
ROWS = {"train": ["t0", "t1", "t2"], "val": ["v0"]}


class Letters:
    """A decoder with one letter per token."""

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        assert kwargs == {"skip_special_tokens": True}
        return "".join(map(chr, token_ids))


def trajectories(texts: Sequence[str]) -> TrajectoryBuffers:
    asked = np.array([63, 63], np.int32)
    return pack_trajectories(
        [
            Trajectory(asked, np.array([*map(ord, text)], np.int32), np.zeros(len(text)), np.zeros(len(text), np.int32))
            for text in texts
        ]
    )


def graded(functions: Path, given: Sequence[TaskPart], texts: Sequence[str], **settings: Any) -> list[list[Score]]:
    config = RewardConfig(function=f"{functions}:by_rank", manager="batch", batch="step", workers=2, **settings)
    prompts = {
        name: [Prompt(row, np.array([63, 63], np.int32), "??", "src", truth) for row, truth in enumerate(truths)]
        for name, truths in ROWS.items()
    }
    with running_manager(config, 6) as manager:
        return StepGrader(manager, TranscriptReader(prompts, Letters())).grade(given, trajectories(texts))


def task(prompt_set: str, rows: Sequence[int], records: Path | None = None) -> TaskPart:
    of_task, prompt_rows = np.arange(len(rows)), np.array(rows, np.int64)
    part = None if records is None else str(records)
    return TaskPart(prompt_set, part, of_task, of_task, prompt_rows, prompt_rows, 0 * of_task)


def test_one_call_sees_the_responses_of_all_tasks_with_their_own_rows(functions: Path) -> None:
    given = [task("train", [2, 0]), task("val", [0]), task("train", [1])]
    first, second, third = graded(functions, given, ["aaaa", "b", "ccc", "dd"])
    assert [score.reward for score in (*first, *second, *third)] == [3, 0, 2, 1]
    assert [score.parts["truth"] for score in (*first, *second, *third)] == ["t2", "t0", "v0", "t1"]
    assert {score.parts["of"] for score in (*first, *second, *third)} == {4}


def test_weight_and_the_punishment_of_long_ones_are_in_the_rewards(functions: Path) -> None:
    overlong = OverlongConfig(enable=True, buffer_tokens=4, penalty=1.0)
    [scores] = graded(functions, [task("train", [0, 1])], ["aaaa", "b"], weight=10.0, overlong=overlong)
    assert [score.reward for score in scores] == [pytest.approx(10 - 0.5), 0]  # half of the overlong buffer
    assert [score.accuracy for score in scores] == [1, 0]


def test_step_grader_writes_parts_and_errors_to_each_tasks_records(functions: Path, tmp_path: Path) -> None:
    parts = [tmp_path / ".step_1.0.0.part", tmp_path / ".step_1.0.1.part"]
    given = [task("train", [0], parts[0]), task("train", [1, 2], parts[1])]
    for part, size in zip(parts, (1, 2), strict=True):
        part.write_text('{"error": null}\n' * size)
    scores = graded(functions, given, ["aa", "bad", "c"])
    for part, of_task in zip(parts, scores, strict=True):
        grades = grades_of(of_task)
        amend_part(str(part), grades.rewards, grades.accuracies, {})
    [[first], [second, third]] = [[json.loads(line) for line in part.read_text().splitlines()] for part in parts]
    assert (first["reward"], first["of"], first["truth"], first["error"]) == (1, 3, "t0", None)
    assert second["reward"] == 0
    assert "nan" in second["error"]
    assert (third["reward"], third["truth"]) == (0, "t2")
    assert grades_of(scores[1]).errors == ((0, second["error"]),)
    assert len(list(tmp_path.glob(".*"))) == 2


def test_until_then_a_response_counts_nothing() -> None:
    rewarder = DeferredRewarder()
    rewarder.submit(5, Prompt(0, np.array([1], np.int32), "", "", None), "a", 1)
    assert rewarder.collect([5]) == {5: Score(0.0, 0.0)}
