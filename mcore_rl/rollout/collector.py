"""Collection of a step's groups: generate, grade, drop groups without signal, refill (DAPO's dynamic sampling)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mcore_rl.config.algorithm import DynamicSamplingConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.records import join_parts, part_path
from mcore_rl.ports import Collector
from mcore_rl.rollout.results import GradingFailures
from mcore_rl.rollout.tasks import cut
from mcore_rl.types import Groups, RolloutResult, RolloutScalars, RolloutTask, SamplingOptions
from mcore_rl.types.json import JsonObject


class RolloutPool(Protocol):
    """Runs tasks on engines."""

    @property
    def num_engines(self) -> int: ...

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        """Return (reference to TrajectoryBuffers, scalars) for each task, in the order of the tasks."""


class RowSampler(Protocol):
    """Samples the prompt rows of new groups."""

    def draw(self, count: int) -> np.ndarray: ...


def training_sampling(rollout: RolloutConfig) -> SamplingOptions:
    """Return the sampling options for training, which use the full softmax (config.rules.rollout)."""
    return SamplingOptions(rollout.max_response_tokens, rollout.temperature, stop=tuple(rollout.stop))


@dataclass
class RolloutCollector:
    """Samples prompts until enough groups have signal, in up to `dynamic.max_batches` batches.

    Every batch is completely generated before the next one is sampled, so that the sampled prompts depend on rewards
    only and a run is repeatable. When the batches are used up, the step is filled with groups without signal (their
    advantages are 0).
    """

    pool: RolloutPool
    sampler: RowSampler
    rollout: RolloutConfig
    dynamic: DynamicSamplingConfig
    has_signal: Callable[[np.ndarray, np.ndarray], np.ndarray]
    """(rewards or accuracies [B], group ids [B]) -> bool [B]: whether the response's group has signal."""
    prompts_per_step: int
    seed: int
    records_dir: Path
    with_greedy: bool = False
    """Also generate one greedy response to every trained prompt (the baseline of ReMax)."""
    failures: GradingFailures | None = None
    next_group: int = field(default=0)

    def collect(self, step: int) -> Groups:
        """Collect the groups of `step`. Exactly prompts_per_step groups are kept."""
        results: list[RolloutResult] = []
        keep: list[np.ndarray] = []
        zero_variance: list[np.ndarray] = []
        records: list[str] = []
        seconds = np.zeros(2)
        missing, sampled, batches = self.prompts_per_step, 0, 0
        max_batches = self.dynamic.max_batches if self.dynamic.enable else 1
        while missing > 0 and batches < max_batches:
            tasks = self._tasks(step, batches, self._sample_size(self.prompts_per_step - missing, sampled))
            batch = self.pool.run(tasks)
            # Engines of a batch run concurrently, so the slowest counts; batches run one after another, so they add up.
            seconds += _slowest([result for _, result in batch])
            for _, result in batch:
                kept, rest = _split_groups(self._signal(result), result.group_ids)
                # Surplus groups are dropped from the end: the kept ones depend on rewards only, not on timing.
                kept, missing = _first_groups(kept, result.group_ids, missing)
                keep.append(kept)
                zero_variance.append(rest)
            results += batch
            records += [str(task.records) for task in tasks]
            sampled += sum(len(task.group_ids) for task in tasks)
            batches += 1
        scalars = [result for _, result in results]
        dropped = sum(num_groups(result.group_ids[rest]) for result, rest in zip(scalars, zero_variance, strict=True))
        # The trainer needs prompts_per_step groups; groups without signal, whose advantages are 0, fill the step.
        _fill_up(keep, zero_variance, scalars, missing)
        join_parts(records, self.records_dir, f"step_{step}")
        greedy = self._greedy(scalars, keep) if self.with_greedy else []
        if self.failures is not None:
            self.failures.check([*scalars, *greedy], f"step {step}", f"rollouts/step_{step}.jsonl")
        seconds += _slowest(greedy)
        chunks = tuple(chunk for chunk, _ in results)
        generating, grading = seconds.tolist()
        return Groups(
            chunks, tuple(scalars), tuple(keep), sampled, dropped, batches, generating, grading, tuple(greedy)
        )

    def state_dict(self) -> JsonObject:
        """Return the position for a checkpoint. Group ids are never reused, since they determine the seeds of
        responses."""
        return {"next_group": self.next_group}

    def load_state_dict(self, state: JsonObject) -> None:
        next_group = state["next_group"]
        assert isinstance(next_group, int)
        self.next_group = next_group

    def _sample_size(self, kept: int, sampled: int) -> int:
        """Return the number of missing groups divided by the fraction of groups with signal so far, at most
        prompts_per_step."""
        if sampled == 0:
            return self.prompts_per_step
        # The lower bound of the fraction limits the number of prompts if hardly any group has had signal so far.
        share = max(kept / sampled, 1 / 16)
        return min(self.prompts_per_step, math.ceil((self.prompts_per_step - kept) / share))

    def _tasks(self, step: int, batch: int, count: int) -> list[RolloutTask]:
        rows = np.asarray(self.sampler.draw(count), np.int64)
        # Ids are unique over the whole run, since the seeds of responses are derived from them.
        ids = np.arange(self.next_group, self.next_group + count, dtype=np.int64)
        self.next_group += count
        samples, sampling = self.rollout.samples_per_prompt, training_sampling(self.rollout)
        tasks = []
        for number, part in enumerate(self._cut(count, samples)):
            records = part_path(self.records_dir, f"step_{step}", batch, number)
            tasks.append(RolloutTask("train", rows[part], ids[part], samples, sampling, self.seed, records))
        return tasks

    def _cut(self, num_groups: int, samples: int) -> list[np.ndarray]:
        return cut(num_groups, samples, self.pool.num_engines, self.rollout.max_concurrent_requests)

    def _greedy(self, scalars: Sequence[RolloutScalars], keep: Sequence[np.ndarray]) -> list[RolloutScalars]:
        """Generate greedy responses to the prompts of the kept groups, with the groups' ids; their tokens are not
        kept."""
        ids = np.concatenate([part.group_ids[kept] for part, kept in zip(scalars, keep, strict=True)])
        rows = np.concatenate([part.prompt_rows[kept] for part, kept in zip(scalars, keep, strict=True)])
        # One row per group: a group has several responses, all with the same prompt.
        ids, first = np.unique(ids, return_index=True)
        sampling = replace(training_sampling(self.rollout), temperature=0.0)
        tasks = [
            RolloutTask("train", rows[first][part], ids[part], 1, sampling, self.seed)
            for part in self._cut(len(ids), 1)
        ]
        return [result for _, result in self.pool.run(tasks)]

    def _signal(self, result: RolloutScalars) -> np.ndarray:
        if not self.dynamic.enable:
            return np.ones(len(result.rewards), bool)
        values = result.accuracies if self.dynamic.metric == "accuracy" else result.rewards
        return self.has_signal(values, result.group_ids)


def _slowest(results: Sequence[RolloutScalars]) -> tuple[float, float]:
    """Return the maximum seconds of generating and of grading over all engines."""
    return (
        max((result.seconds_generating for result in results), default=0.0),
        max((result.seconds_grading for result in results), default=0.0),
    )


def num_groups(group_ids: np.ndarray) -> int:
    """Count groups of responses whose groups are consecutive. Shapes: [B]."""
    return int(np.count_nonzero(np.diff(group_ids))) + 1 if len(group_ids) else 0


def _first_groups(rows: np.ndarray, group_ids: np.ndarray, count: int) -> tuple[np.ndarray, int]:
    """Return the part of `rows` that belongs to their first `count` groups, and the number of missing groups."""
    # ordinals[i]: number of the group of rows[i], counted from 0 in these rows.
    ordinals = np.cumsum(np.diff(group_ids[rows], prepend=group_ids[rows[:1]]) != 0)
    return rows[ordinals < count], max(0, count - num_groups(group_ids[rows]))


def _fill_up(
    keep: list[np.ndarray], zero_variance: list[np.ndarray], scalars: Sequence[RolloutScalars], missing: int
) -> None:
    for i, rest in enumerate(zero_variance):
        if missing > 0 and len(rest):
            taken, missing = _first_groups(rest, scalars[i].group_ids, missing)
            keep[i] = np.sort(np.concatenate([keep[i], taken]))


def _split_groups(signal: np.ndarray, group_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the response indices of groups with signal and of groups without. Groups are consecutive; their sizes may
    differ if episodes consist of several sequences."""
    # The prepended id differs from the first one, so that the first response is a start, too.
    starts = np.flatnonzero(np.diff(group_ids, prepend=group_ids[:1] - 1))
    sizes = np.diff([*starts, len(signal)])
    with_signal = np.repeat(np.logical_and.reduceat(signal, starts), sizes) if len(starts) else signal
    return np.flatnonzero(with_signal), np.flatnonzero(~with_signal)


if TYPE_CHECKING:
    _port: type[Collector] = RolloutCollector
