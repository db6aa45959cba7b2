"""Rewards that are computed after a step's tasks have been generated: functions of all responses, and reward models.

    reward = reward.weight * rule + overlong punishment + sum of weight * score over the models

A model scores whole tasks on its own ranks. The engines that wrote the tasks' records add the scores to them, so that
neither tokens nor texts pass through the driver. Each class here is a pool that returns responses with these rewards.
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


class RecordedPool(RolloutPool, Protocol):
    """Pool that can update its tasks' records."""

    def amend(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> None:
        """Write rewards, accuracies and scores of `results` into the tasks' records, if there are any."""


class DeferredGradingPool(RecordedPool, Protocol):
    """Pool that grades responses after all of them have been generated."""

    def grade(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[Grades]:
        """Grade the responses of all tasks together. The grades are kept for the tasks' records until `amend`."""


@dataclass(frozen=True)
class StepGradingPool:
    """RecordedPool whose rewards come from a function that grades all responses of a `run` together."""

    pool: DeferredGradingPool

    @property
    def num_engines(self) -> int:
        return self.pool.num_engines

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        results = self.pool.run(tasks)
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

    def amend(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> None:
        self.pool.amend(tasks, results)


@dataclass(frozen=True)
class WeightedScorer:
    scorer: ResponseScorer
    weight: float


@dataclass(frozen=True)
class ScoredPool:
    """Pool that adds the scores of `scorers` to the results of `pool`. Keys are the names in metrics and records.

    Without rules (`has_rules` is False), no grader decides whether a response is right: its accuracy is then its
    reward.
    """

    pool: RecordedPool
    scorers: Mapping[str, WeightedScorer]
    has_rules: bool

    @property
    def num_engines(self) -> int:
        return self.pool.num_engines

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        """Run the tasks and score them; scoring counts as grading time."""
        return self.scored(tasks, self.pool.run(tasks))

    def scored(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[RolloutResult]:
        """Add the scores to the results and to the tasks' records."""
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
        return replace(
            scalars,
            rewards=rewards,
            accuracies=scalars.accuracies if self.has_rules else rewards,
            scores=scores,
            seconds_grading=scalars.seconds_grading + seconds,
        )


def _of_episodes(values: np.ndarray, episodes: np.ndarray | None) -> np.ndarray:
    """Return each response's value; responses of one episode share one reward and therefore get the episode's mean."""
    if episodes is None:
        return values
    sums, counts = np.bincount(episodes, values), np.bincount(episodes)
    return (sums[episodes] / counts[episodes]).astype(np.float32)
