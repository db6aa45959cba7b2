"""Collection of a step's groups: generate, grade, drop groups without signal, refill (DAPO's dynamic sampling)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from mcore_rl.config.algorithm import AlgorithmConfig, DynamicSamplingConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.records import join_parts, part_path
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.rollout.results import GradingFailures
from mcore_rl.rollout.tasks import split
from mcore_rl.types import Groups, Metric, RolloutResult, RolloutScalars, RolloutTask, SamplingOptions, Total
from mcore_rl.types.json import JsonObject


class RolloutPool(Protocol):
    """Runs tasks on engines."""

    @property
    def num_engines(self) -> int: ...

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutResult]:
        """Return (reference to TrajectoryBuffers, scalars) for each task, in the order of the tasks."""


def training_sampling(rollout: RolloutConfig) -> SamplingOptions:
    """Return the sampling options for training. They truncate only with rollout.keep_sampling_mask
    (config.rules.rollout)."""
    options = SamplingOptions(rollout.max_response_tokens, rollout.temperature, stop=tuple(rollout.stop))
    if not rollout.keep_sampling_mask:
        return options
    return replace(options, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p, keep_mask=True)


@dataclass
class GroupSource:
    """Source of new groups: their prompts, numbers and tasks. It also decides whether a finished group has signal."""

    sampler: PromptSampler
    rollout: RolloutConfig
    algorithm: AlgorithmConfig
    has_signal: Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]
    """(rewards or accuracies [B], group ids [B], roles [B] if they are compared on their own) -> bool [B]: whether the
    response's group has signal."""
    prompts_per_step: int
    seed: int
    records_dir: Path
    failures: GradingFailures
    keeps_all: bool = False
    """Keep all groups, also with dynamic sampling."""
    next_group: int = field(default=0, init=False)

    @property
    def dynamic(self) -> DynamicSamplingConfig:
        """Section algorithm.dynamic_sampling."""
        sampling = self.algorithm.dynamic_sampling
        return replace(sampling, enable=False) if self.keeps_all else sampling

    def new_task(self, count: int) -> RolloutTask:
        """Return the task of `count` new groups."""
        rows = np.asarray(self.sampler.draw(count), np.int64)
        # Ids are unique over the whole run, since the seeds of responses are derived from them.
        ids = np.arange(self.next_group, self.next_group + count, dtype=np.int64)
        self.next_group += count
        return self.task(rows, ids)

    def task(self, rows: np.ndarray, ids: np.ndarray) -> RolloutTask:
        """Return the task of the groups `ids` for the prompts `rows`."""
        samples, sampling = self.rollout.samples_per_prompt, training_sampling(self.rollout)
        return RolloutTask("train", rows, ids, samples, sampling, self.seed)

    def signal(self, scalars: RolloutScalars) -> np.ndarray:
        """Return for each response whether its group has signal. Shapes: bool [B]."""
        if not self.dynamic.enable:
            return np.ones(len(scalars.rewards), bool)
        values = scalars.accuracies if self.dynamic.metric == "accuracy" else scalars.rewards
        roles = scalars.roles if self.algorithm.baseline == "role" else None
        if roles is not None:
            assert scalars.other_rewards is not None, "they come with the roles"
            # The reward from which the advantages of a role are computed (trainer/batches.py). With roles that play
            # against each other, the whole rewards are all equal.
            values = values - scalars.other_rewards
        return self.has_signal(values, scalars.group_ids, roles)

    def state_dict(self) -> JsonObject:
        """Return the position for a checkpoint. Group ids are never reused, since they determine the seeds of
        responses."""
        return {"next_group": self.next_group}

    def load_state_dict(self, state: JsonObject) -> None:
        next_group = state["next_group"]
        assert isinstance(next_group, int)
        self.next_group = next_group


@dataclass(frozen=True)
class RolloutCollector:
    """Samples prompts until enough groups have signal, in up to `dynamic.max_batches` batches.

    Every batch is completely generated before the next one is sampled, so that the sampled prompts depend on rewards
    only and a run is repeatable. When the batches are used up, the step is filled with groups without signal (their
    advantages are 0).
    """

    pool: RolloutPool
    source: GroupSource
    with_greedy: bool = False
    """Also generate one greedy response to every trained prompt (the baseline of ReMax)."""

    def collect(self, step: int) -> Groups:
        """Collect the groups of `step`. Exactly prompts_per_step groups are kept."""
        source, size = self.source, self.source.prompts_per_step
        results: list[RolloutResult] = []
        records: list[str] = []
        # Ids of groups.
        kept: list[int] = []
        zero_variance: list[int] = []
        seconds = np.zeros(2)
        sampled, batches = 0, 0
        max_batches = source.dynamic.max_batches if source.dynamic.enable else 1
        while len(kept) < size and batches < max_batches:
            task = source.new_task(self._sample_size(len(kept), sampled))
            records_of = partial(part_path, source.records_dir, f"step_{step}", batches)
            tasks = split(task, self.pool.num_engines, source.rollout.max_concurrent_requests, records_of)
            batch = self.pool.run(tasks)
            # Engines of a batch run concurrently, so the slowest counts; batches run one after another, so they add up.
            seconds += _slowest([result for _, result in batch])
            for _, result in batch:
                ids, first = np.unique(result.group_ids, return_index=True)
                signal = source.signal(result)[first]
                # Surplus groups are dropped from the end: the kept ones depend on rewards only, not on timing.
                kept += ids[signal][: size - len(kept)].tolist()
                zero_variance += ids[~signal].tolist()
            results += batch
            records += [str(part.records) for part in tasks]
            sampled += len(task.group_ids)
            batches += 1
        # The trainer needs prompts_per_step groups; groups without signal, whose advantages are 0, fill the step.
        kept += zero_variance[: size - len(kept)]
        scalars = [result for _, result in results]
        keep = _rows_of_groups(kept, scalars)
        join_parts(records, source.records_dir, f"step_{step}")
        greedy = self._greedy(scalars, keep) if self.with_greedy else []
        source.failures.check([*scalars, *greedy], f"step {step}", f"rollouts/step_{step}.jsonl")
        seconds += _slowest(greedy)
        metrics: dict[str, Metric] = {
            "groups/drawn": Total(sampled),
            "groups/dropped": Total(len(zero_variance)),
            "groups/batches": Total(batches),
            "time/generate": Total(float(seconds[0])),
            "time/reward": Total(float(seconds[1])),
        }
        chunks = tuple(chunk for chunk, _ in results)
        return Groups(chunks, tuple(scalars), tuple(keep), tuple(greedy), metrics)

    def _sample_size(self, kept: int, sampled: int) -> int:
        """Return the number of missing groups divided by the fraction of groups with signal so far, at most
        prompts_per_step."""
        size = self.source.prompts_per_step
        if sampled == 0:
            return size
        # The lower bound of the fraction limits the number of prompts if hardly any group has had signal so far.
        share = max(kept / sampled, 1 / 16)
        return min(size, math.ceil((size - kept) / share))

    def _greedy(self, scalars: Sequence[RolloutScalars], keep: Sequence[np.ndarray]) -> list[RolloutScalars]:
        """Generate greedy responses to the prompts of the kept groups, with the groups' ids; their tokens are not
        kept."""
        ids = np.concatenate([part.group_ids[kept] for part, kept in zip(scalars, keep, strict=True)])
        rows = np.concatenate([part.prompt_rows[kept] for part, kept in zip(scalars, keep, strict=True)])
        # One row per group: a group has several responses, all with the same prompt.
        ids, first = np.unique(ids, return_index=True)
        task = self.source.task(rows[first], ids)
        task = replace(task, samples_per_prompt=1, sampling=replace(task.sampling, temperature=0.0))
        tasks = split(task, self.pool.num_engines, self.source.rollout.max_concurrent_requests)
        return [result for _, result in self.pool.run(tasks)]


def _rows_of_groups(groups: Sequence[int], scalars: Sequence[RolloutScalars]) -> list[np.ndarray]:
    """Return the rows of each rollout call that belong to `groups`."""
    # One search for all calls: there are several per engine, and each search reads all of `groups`.
    belongs = np.isin(np.concatenate([part.group_ids for part in scalars]), groups)
    ends = np.cumsum([len(part.group_ids) for part in scalars])
    return [np.flatnonzero(rows) for rows in np.split(belongs, ends[:-1])]


def _slowest(results: Sequence[RolloutScalars]) -> np.ndarray:
    """Return the maximum seconds of generating and of grading over all engines. Shapes: [2]."""
    seconds = [(result.seconds_generating, result.seconds_grading) for result in results]
    return np.max([(0.0, 0.0), *seconds], axis=0)
