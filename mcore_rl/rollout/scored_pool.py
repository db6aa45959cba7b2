"""Rewards that are computed after a step's tasks have been generated: functions of all responses, and reward models.

    reward = reward.weight * rule + overlong punishment + sum of weight * score over the models

A model scores whole tasks on its own ranks. The engines that wrote the tasks' records add the scores to them, so that
neither tokens nor texts pass through the driver.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mcore_rl.ports import ResponseScorer
from mcore_rl.rollout.collector import RolloutPool
from mcore_rl.types import Grades, RolloutResult, RolloutScalars, RolloutTask


class DeferredGradingPool(RolloutPool, Protocol):
    """Pool that can grade responses after all of them have been generated, and update its tasks' records."""

    def grade(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[Grades]:
        """Grade the responses of all tasks together. The grades are kept for the tasks' records until `amend`."""

    def amend(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> None:
        """Write rewards, accuracies and scores of `results` into the tasks' records, if there are any."""


@dataclass(frozen=True)
class WeightedScorer:
    scorer: ResponseScorer
    weight: float


@dataclass(frozen=True)
class ScoredPool:
    """Pool that adds the scores of `scorers` to the results of `pool`. Keys are the names in metrics and records.

    Without rules (`has_rules` is False), no grader decides whether a response is right: its accuracy is then its
    reward. With `grades_step`, the rules' rewards come from a function that grades all responses of a `run` together.
    """

    pool: DeferredGradingPool
    scorers: Mapping[str, WeightedScorer]
    has_rules: bool
    grades_step: bool = False

    @property
    def num_engines(self) -> int:
        return self.pool.num_engines

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        """Run, grade and score the tasks."""
        results = self.pool.run(tasks)
        if self.grades_step:
            results = self._graded(tasks, results)
        return self.scored(tasks, results) if self.scorers else results

    def _graded(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[RolloutResult]:
        started = time.perf_counter()
        grades = self.pool.grade(tasks, results)
        # Counts as grading time: the step waits for it after all responses have been generated.
        seconds = time.perf_counter() - started
        graded = [
            (chunk, replace(scalars, **vars(of_task), seconds_grading=scalars.seconds_grading + seconds))
            for (chunk, scalars), of_task in zip(results, grades, strict=True)
        ]
        self.pool.amend(tasks, graded)
        return graded

    def scored(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[RolloutResult]:
        """Add the scores to the results and to the tasks' records; scoring counts as grading time."""
        started = time.perf_counter()
        scores_by_name = {name: weighted.scorer.score(tasks, results) for name, weighted in self.scorers.items()}
        seconds = time.perf_counter() - started
        scored = []
        for index, (chunk, scalars) in enumerate(results):
            task_scores = {name: np.asarray(scores[index], np.float32) for name, scores in scores_by_name.items()}
            scored.append((chunk, self._with_scores(scalars, task_scores, seconds)))
        self.pool.amend(tasks, scored)
        return scored

    def _with_scores(self, scalars: RolloutScalars, scores: dict[str, np.ndarray], seconds: float) -> RolloutScalars:
        rewards = scalars.rewards.copy()
        for name, values in scores.items():
            assert values.shape == rewards.shape, f"{name}: {values.shape} scores for {rewards.shape} responses"
            # `rewards` is a copy, so that the given results keep the rules' rewards.
            rewards += np.float32(self.scorers[name].weight) * _of_episodes(values, scalars.episodes)
        accuracies = scalars.accuracies if self.has_rules else rewards
        seconds += scalars.seconds_grading
        return replace(scalars, rewards=rewards, accuracies=accuracies, scores=scores, seconds_grading=seconds)


def _of_episodes(values: np.ndarray, episodes: np.ndarray | None) -> np.ndarray:
    """Return each response's value; responses of one episode share one reward and therefore get the episode's mean."""
    if episodes is None:
        return values
    sums, counts = np.bincount(episodes, values), np.bincount(episodes)
    return (sums[episodes] / counts[episodes]).astype(np.float32)
