"""Rewards that are known only when a step's tasks have been generated: those of a function that sees them all, and
those of models beside the rules'. Each is a pool whose responses come back with them.

    reward = reward.weight * rule + overlong punishment + sum of weight * score over the models

A model scores whole tasks after generation, wherever its ranks are; the engines that wrote the tasks' records put the
scores into them, so that neither tokens nor texts pass through the driver.
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
    """A pool that can change what its tasks have recorded."""

    def amend(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> None:
        """Puts rewards, accuracies and scores of `results` into the tasks' records, where they keep any."""


class GradingPool(RecordedPool, Protocol):
    """A pool that grades responses after all of them have come."""

    def grade(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[Grades]:
        """Of the responses of each task, whose rewards are not known yet, graded all together; what graders say of each
        is kept for the tasks' records until they are amended."""


@dataclass(frozen=True)
class StepGradingPool:
    """`pool` with the rewards of a function that sees all responses of a `run` together. A RecordedPool."""

    pool: GradingPool

    @property
    def num_engines(self) -> int:
        return self.pool.num_engines

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        results = self.pool.run(tasks)
        started = time.perf_counter()
        grades = self.pool.grade(tasks, results)
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
    """`pool` with the scores of `scorers`, by the name under which metrics and records show them.

    Without rules (`has_rules` False) nothing says whether a response is right: its accuracy is then its reward.
    """

    pool: RecordedPool
    scorers: Mapping[str, WeightedScorer]
    has_rules: bool

    @property
    def num_engines(self) -> int:
        return self.pool.num_engines

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        """As RolloutPool.run; scoring counts as grading."""
        return self.scored(tasks, self.pool.run(tasks))

    def scored(self, tasks: Sequence[RolloutTask], results: Sequence[RolloutResult]) -> list[RolloutResult]:
        """The results with the scores, which are in the tasks' records then."""
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
            rewards += np.float32(self.scorers[name].weight) * _of_episodes(values, scalars.episodes)
        return replace(
            scalars,
            rewards=rewards,
            accuracies=scalars.accuracies if self.has_rules else rewards,
            scores=scores,
            seconds_grading=scalars.seconds_grading + seconds,
        )


def _of_episodes(values: np.ndarray, episodes: np.ndarray | None) -> np.ndarray:
    """Every response's value, or the mean of those of its episode, whose responses have one reward."""
    if episodes is None:
        return values
    sums, counts = np.bincount(episodes, values), np.bincount(episodes)
    return (sums[episodes] / counts[episodes]).astype(np.float32)
