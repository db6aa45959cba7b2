"""Benchmark loads have the documented properties: equal on both sides, whole groups, records where they are joined."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.driver.load import DULL_FRACTION, ReadyPool, make_episodes, make_scalars
from benchmarks.whole_step.forced_lengths import ForcedLengthGenerator
from benchmarks.whole_step.task import EQUAL_TOKENS, LONGEST, RESPONSES, WORKLOADS, lengths, schedule
from mcore_rl.data.batching import one_row_per_episode
from mcore_rl.types import GenerationRequest, RolloutTask, SamplingOptions

EQUAL, LONG_TAILED = WORKLOADS


def test_lengths_are_the_same_on_both_sides_and_differ_between_steps() -> None:
    assert (lengths(LONG_TAILED, 3) == lengths(LONG_TAILED, 3)).all()
    assert (lengths(LONG_TAILED, 3) != lengths(LONG_TAILED, 4)).any()
    assert (lengths(EQUAL, 3) == EQUAL_TOKENS).all()


def test_long_tails_are_long() -> None:
    drawn = np.concatenate([lengths(LONG_TAILED, step) for step in range(20)])
    assert drawn.min() >= 1
    assert drawn.max() == LONGEST
    assert 56 < drawn.mean() < 72  # the longest response has four times the mean length


def test_the_schedule_has_every_step_of_every_workload_in_order() -> None:
    plan = schedule()
    assert len(plan) == sum(workload.steps for workload in WORKLOADS)
    assert (plan[0] == lengths(EQUAL, 0)).all()
    assert (plan[EQUAL.steps + 1] == lengths(LONG_TAILED, 1)).all()


class _Engine:
    """Fake engine that records the requests of each call."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def generate(self, requests, on_finish, begun) -> None:
        del on_finish, begun
        self.asked.append([request.sampling.max_response_tokens for request in requests])


def test_forced_lengths_depend_on_the_response_and_not_on_the_engine() -> None:
    sampling, wanted = SamplingOptions(LONGEST), np.array([3, 5, 1, 2])
    requests = [
        GenerationRequest(f"train.{group}.{sample}", np.array([4], np.int32), 0, sampling)
        for group in range(2)
        for sample in range(2)
    ]
    for order in ([0, 1, 2, 3], [2, 3], [1, 0]):
        engine = _Engine()
        forced = ForcedLengthGenerator(engine, wanted, samples=2)
        forced.generate([requests[number] for number in order], lambda completion: None, lambda: None)
        assert engine.asked == [wanted[order].tolist()]
    assert len(lengths(LONG_TAILED, 0)) == RESPONSES


def _task(directory: Path, groups: int) -> RolloutTask:
    rows = np.arange(groups, dtype=np.int64)
    sampling = SamplingOptions(16)
    return RolloutTask("train", rows, rows + 100, 4, sampling, 1, str(directory / "part"))


def test_ready_scalars_have_the_claimed_share_of_groups_without_signal(tmp_path: Path) -> None:
    scalars = make_scalars(_task(tmp_path, 4000))
    assert (scalars.group_ids == np.repeat(np.arange(100, 4100), 4)).all()
    by_group = scalars.accuracies.reshape(-1, 4)
    dull = (by_group == by_group[:, :1]).all(axis=1).mean()
    by_chance = 2 * 0.5**4
    expected = DULL_FRACTION + (1 - DULL_FRACTION) * by_chance
    assert abs(dull - expected) < 0.04  # five standard deviations


def test_ready_episodes_are_the_responses_with_two_sequences_each(tmp_path: Path) -> None:
    task = _task(tmp_path, 500)
    single, several = make_scalars(task), make_episodes(task)
    assert abs(len(several.rewards) / len(single.rewards) - 2.0) < 0.1  # five standard deviations
    episodes = one_row_per_episode(several)
    assert (episodes.rewards == single.rewards).all()
    assert (episodes.group_ids == single.group_ids).all()
    assert {len(values) for values in several.episode_metrics.values()} == {len(several.rewards)}


def test_the_ready_pool_leaves_the_records_that_the_collector_joins(tmp_path: Path) -> None:
    task = _task(tmp_path, 3)
    (_, scalars), *_ = ReadyPool(tmp_path).run([task])
    assert len((tmp_path / "part").read_bytes().splitlines()) == len(scalars.rewards) == 12
