"""Collects one step's groups: generate, score, drop groups without signal, refill (DAPO's dynamic sampling)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mcore_rl.config.algorithm import DynamicSamplingConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.records import join_parts, part_path
from mcore_rl.ports import Collector
from mcore_rl.rollout.failures import GradingFailures
from mcore_rl.rollout.tasks import cut
from mcore_rl.types import BuffersRef, Groups, RolloutResult, RolloutScalars, RolloutTask, SamplingOptions


class RolloutPool(Protocol):
    """Runs tasks on engines, wherever they are."""

    @property
    def num_engines(self) -> int: ...

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        """One (reference of TrajectoryBuffers, scalars) per task, in the order of the tasks."""


class RowSampler(Protocol):
    def draw(self, count: int) -> np.ndarray: ...


def training_sampling(rollout: RolloutConfig) -> SamplingOptions:
    """Sampling options of responses that are trained on: of the full softmax (config.rules.sampling)."""
    return SamplingOptions(rollout.max_response_tokens, rollout.temperature, stop=tuple(rollout.stop))


@dataclass
class RolloutCollector:
    """Draws prompts until enough groups have signal, in up to `dynamic.max_batches` batches.

    Every batch is generated to its end before the next one is drawn, so what is drawn depends on rewards only and
    a run can be repeated. When the batches are used up the best that exists is trained: the groups with signal, and
    as many without (their advantages are 0) as a whole step still needs.
    """

    pool: RolloutPool
    sampler: RowSampler
    rollout: RolloutConfig
    dynamic: DynamicSamplingConfig
    has_signal: Callable[[np.ndarray, np.ndarray], np.ndarray]
    prompts_per_step: int
    seed: int
    records_dir: Path
    with_greedy: bool = False
    """Also one greedy response to every prompt that is trained on (the baseline of ReMax)."""
    failures: GradingFailures | None = None
    next_group: int = field(default=0)

    def collect(self, step: int) -> Groups:
        """Groups for `step`; exactly prompts_per_step of them are kept."""
        chunks: list[BuffersRef] = []
        scalars: list[RolloutScalars] = []
        keep: list[np.ndarray] = []
        dull: list[np.ndarray] = []
        records: list[str] = []
        seconds = np.zeros(2)
        kept_groups, drawn, batches = 0, 0, 0
        while kept_groups < self.prompts_per_step and batches < self._max_batches():
            tasks = self._tasks(step, batches, self._draw_size(kept_groups, drawn))
            results = self.pool.run(tasks)
            seconds += _slowest([result for _, result in results])
            for task, (chunk, result) in zip(tasks, results, strict=True):
                kept, rest = _split_groups(self._signal(result), result.group_ids)
                kept, missing = _first_groups(kept, result.group_ids, self.prompts_per_step - kept_groups)
                chunks.append(chunk)
                scalars.append(result)
                keep.append(kept)
                dull.append(rest)
                records.append(str(task.records))
                kept_groups = self.prompts_per_step - missing
                drawn += len(task.group_ids)
            batches += 1
        dropped = sum(num_groups(result.group_ids[rest]) for result, rest in zip(scalars, dull, strict=True))
        _fill_with_dull(keep, dull, scalars, self.prompts_per_step - kept_groups)
        join_parts(records, self.records_dir, f"step_{step}")
        greedy = self._greedy(scalars, keep) if self.with_greedy else []
        if self.failures is not None:
            self.failures.check([*scalars, *greedy], f"step {step}", f"rollouts/step_{step}.jsonl")
        seconds += _slowest(greedy)
        generating, grading = seconds.tolist()
        return Groups(
            tuple(chunks), tuple(scalars), tuple(keep), drawn, dropped, batches, generating, grading, tuple(greedy)
        )

    def state_dict(self) -> dict[str, Any]:
        """Position for a checkpoint: group ids are never reused, since the seeds of responses come from them."""
        return {"next_group": self.next_group}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_group = int(state["next_group"])

    def _max_batches(self) -> int:
        return self.dynamic.max_batches if self.dynamic.enable else 1

    def _draw_size(self, kept: int, drawn: int) -> int:
        """As many prompts as are missing, over the share that had signal so far; never more than a full step's."""
        if drawn == 0:
            return self.prompts_per_step
        share = max(kept / drawn, 1 / 16)
        return min(self.prompts_per_step, math.ceil((self.prompts_per_step - kept) / share))

    def _tasks(self, step: int, batch: int, count: int) -> list[RolloutTask]:
        rows = np.asarray(self.sampler.draw(count), np.int64)
        ids = np.arange(self.next_group, self.next_group + count, dtype=np.int64)
        self.next_group += count
        samples, sampling = self.rollout.samples_per_prompt, training_sampling(self.rollout)
        return [
            RolloutTask(
                "train",
                rows[part],
                ids[part],
                samples,
                sampling,
                self.seed,
                part_path(self.records_dir, f"step_{step}", batch, number),
            )
            for number, part in enumerate(self._cut(count, samples))
        ]

    def _cut(self, num_groups: int, samples: int) -> list[np.ndarray]:
        return cut(num_groups, samples, self.pool.num_engines, self.rollout.max_concurrent_requests)

    def _greedy(self, scalars: Sequence[RolloutScalars], keep: Sequence[np.ndarray]) -> list[RolloutScalars]:
        """Greedy responses to the prompts of the kept groups, under the groups' ids; their tokens are let go."""
        ids = np.concatenate([part.group_ids[kept] for part, kept in zip(scalars, keep, strict=True)])
        rows = np.concatenate([part.prompt_rows[kept] for part, kept in zip(scalars, keep, strict=True)])
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
    """Seconds of generating and of grading until the last engine is done."""
    return (
        max((result.seconds_generating for result in results), default=0.0),
        max((result.seconds_grading for result in results), default=0.0),
    )


def num_groups(group_ids: np.ndarray) -> int:
    """Of responses whose groups are consecutive. Shapes: [B]."""
    return int(np.count_nonzero(np.diff(group_ids))) + 1 if len(group_ids) else 0


def _first_groups(rows: np.ndarray, group_ids: np.ndarray, count: int) -> tuple[np.ndarray, int]:
    """Those of `rows` that are of the first `count` groups among them; how many groups that lacks of `count`."""
    ordinals = np.cumsum(np.diff(group_ids[rows], prepend=group_ids[rows[:1]]) != 0)
    return rows[ordinals < count], max(0, count - num_groups(group_ids[rows]))


def _fill_with_dull(
    keep: list[np.ndarray], dull: list[np.ndarray], scalars: Sequence[RolloutScalars], missing: int
) -> None:
    for i, rest in enumerate(dull):
        if missing > 0 and len(rest):
            taken, missing = _first_groups(rest, scalars[i].group_ids, missing)
            keep[i] = np.sort(np.concatenate([keep[i], taken]))


def _split_groups(signal: np.ndarray, group_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Response indices of groups with signal, and of those without. Groups are consecutive; their sizes may differ,
    where episodes leave several sequences."""
    starts = np.flatnonzero(np.diff(group_ids, prepend=group_ids[:1] - 1))
    sizes = np.diff([*starts, len(signal)])
    with_signal = np.repeat(np.logical_and.reduceat(signal, starts), sizes) if len(starts) else signal
    return np.flatnonzero(with_signal), np.flatnonzero(~with_signal)


if TYPE_CHECKING:
    _port: type[Collector] = RolloutCollector
