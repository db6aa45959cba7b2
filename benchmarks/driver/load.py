"""Load of benchmarks.driver.driver: instant engines and trainer ranks with data of realistic sizes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from benchmarks.sizes import size
from mcore_rl.runtime.delivery import rows_by_rank
from mcore_rl.types import (
    Batch,
    BatchHandle,
    BuffersRef,
    Mean,
    Metric,
    RankShares,
    RolloutResult,
    RolloutScalars,
    RolloutTask,
)

PROMPTS, SAMPLES, ENGINES, DP_RANKS = size((8192, 16, 64, 64), (64, 2, 2, 2))
LONGEST = 20480
"""Maximum response length in tokens, as in DAPO's recipe."""
DULL_FRACTION = 0.3
"""Fraction of zero-variance groups, so that a step samples two batches."""
RECORD_BYTES = 1024
"""Size of a response record in rollouts/step_<n>.jsonl. Engines write records, the driver joins their files."""


def make_scalars(task: RolloutTask) -> RolloutScalars:
    """Return lognormal lengths and rewards 0 or 1; DULL_FRACTION of the groups have equal rewards."""
    groups, samples = len(task.group_ids), task.samples_per_prompt
    rng = np.random.default_rng(int(task.group_ids[0]))  # the same in every process and run
    responses = np.clip(rng.lognormal(7.0, 1.0, groups * samples), 1, LONGEST).astype(np.int32)
    rewards = rng.integers(0, 2, (groups, samples)).astype(np.float32)
    # Dynamic sampling drops these groups, so the collector must sample further ones.
    rewards[rng.random(groups) < DULL_FRACTION] = 1.0
    rewards = rewards.ravel()
    return RolloutScalars(
        group_ids=np.repeat(task.group_ids, samples),
        prompt_rows=np.repeat(task.prompt_rows, samples),
        total_tokens=responses + 200,
        response_tokens=responses,
        trained_tokens=responses,
        rewards=rewards,
        accuracies=rewards,
        clipped=(responses == LONGEST).astype(np.uint8),
        versions=np.zeros((len(responses), 2), np.int32),
    )


MOST_SEQUENCES = 3
"""Maximum number of sequences of an episode whose history is rendered again for each turn; the mean is 2."""
FIGURES = ("turns", "tool_calls", "tool_errors", "failed", "seconds_generating", "seconds_tool_calling")
PARTS = ("format", "tool_search", "tool_python")
FAILED_FRACTION = 0.001
"""Fraction of episodes that failed."""


def make_episodes(task: RolloutTask) -> RolloutScalars:
    """Return scalars of episodes with several sequences, metrics of tools, three reward parts, and some failures."""
    single = make_scalars(task)
    rng = np.random.default_rng([int(task.group_ids[0]), 1])
    counts = rng.integers(1, MOST_SEQUENCES + 1, len(single.rewards))
    rows = {field.name: getattr(single, field.name) for field in fields(RolloutScalars)}
    rows = {name: np.repeat(value, counts, axis=0) for name, value in rows.items() if isinstance(value, np.ndarray)}
    # Rows of an episode follow each other; its first row identifies it.
    first = np.cumsum(counts) - counts
    failed = first[rng.random(len(first)) < FAILED_FRACTION].tolist()
    return replace(
        single,
        **rows,
        episodes=np.repeat(first, counts),
        errors=tuple((row, "the tool raised") for row in failed),
        episode_metrics={f"episode/{name}": np.repeat(rng.random(len(counts)), counts) for name in FIGURES},
        parts={name: np.repeat(rng.random(len(counts)), counts) for name in PARTS},
        digests=rng.integers(0, 2**32, int(counts.sum()), np.uint32),
        version_tokens=((0, int(rows["trained_tokens"].sum())),),
    )


Make = Callable[[RolloutTask], RolloutScalars]


def write_records(directory: Path, task: RolloutTask) -> None:
    """Create the records of a task as a link to a shared file, so that only the driver writes to the disk."""
    count = len(task.group_ids) * task.samples_per_prompt
    ready = directory / f"records.{count}"
    if not ready.exists():  # one file per number of responses
        ready.write_bytes((b"x" * (RECORD_BYTES - 1) + b"\n") * count)
    os.link(ready, str(task.records))


class ReadyPool:
    """RolloutPool in this process whose tasks return the results of `make`."""

    num_engines = ENGINES

    def __init__(self, directory: Path, make: Make = make_scalars) -> None:
        self._directory, self._make = directory, make
        self._wall_seconds = self._cpu_seconds = 0.0

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        wall, cpu = time.perf_counter(), time.process_time()
        results: list[RolloutResult] = []
        for task in tasks:
            write_records(self._directory, task)
            results.append((BuffersRef(None), self._make(task)))
        self._wall_seconds += time.perf_counter() - wall
        self._cpu_seconds += time.process_time() - cpu
        return results

    def seconds_pretending(self) -> tuple[float, float]:
        """Return wall-clock and CPU seconds of the simulated results since the last call."""
        spent = self._wall_seconds, self._cpu_seconds
        self._wall_seconds = self._cpu_seconds = 0.0
        return spent


class SilentRanks:
    """Splits the batch for all data-parallel ranks like TrainerGroup, without ranks."""

    def recompute_logp(self, batch: Batch) -> BatchHandle:
        self.cut(batch)
        return BatchHandle(batch, 0)

    def update(self, handle: BatchHandle) -> dict[str, Metric]:
        self.cut(handle.batch)
        return {"actor/loss": Mean(0.0, 1)}

    def cut(self, batch: Batch) -> list[RankShares]:
        _, places = rows_by_rank(batch, DP_RANKS)
        return batch.shares(DP_RANKS, places)
