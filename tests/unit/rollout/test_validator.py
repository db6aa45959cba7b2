"""Validation and probes: sampling, repeatability, and the order of scalars and records."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import RewardError
from mcore_rl.rewards.step_grading import DeferredRewarder
from mcore_rl.rollout.episodes.single_turn import SingleTurnPlayer
from mcore_rl.rollout.validator import MAX_TOKENS, PROBE, RolloutValidator, probe_task
from mcore_rl.rollout.worker import RolloutWorker
from mcore_rl.types import (
    Completion,
    GenerationRequest,
    Prompt,
    RolloutScalars,
    RolloutTask,
    SamplingOptions,
    Score,
    TrajectoryBuffers,
)
from tests.unit.rollout.made import FAILURES, Digits

NUM_PROMPTS = 5
Finish = Callable[[Completion], None]


class SeedEngine:
    """Engine whose response is the request's seed, one digit per token."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def generate(self, requests: Sequence[GenerationRequest], on_finish: Finish, begun: Callable[[], None]) -> None:
        self.requests += requests
        for request in reversed(requests):
            ids = np.array([int(digit) for digit in str(request.seed)], np.int32)
            on_finish(Completion(request.request_id, ids, np.zeros(len(ids), np.float32), "stop", 0 * ids + 3))


class ParityRewarder:
    """Rewarder for which a response is right if it ends with an even digit."""

    def __init__(self) -> None:
        self.scores: dict[int, Score] = {}

    def submit(self, key: int, prompt: Prompt, response_text: str, response_tokens: int, **batch: object) -> None:
        right = int(response_text[-1]) % 2 == 0
        parts = {f"of_row_{prompt.row}": float(key), "right": float(right)}
        self.scores[key] = Score(1.0 if right else -1.0, float(right), parts=parts)

    def collect(self, keys: Collection[int]) -> dict[int, Score]:
        return {key: self.scores.pop(key) for key in keys}


class WorkerPool:
    """Real workers on engines that echo seeds."""

    def __init__(self, num_engines: int) -> None:
        prompts = {"val": [Prompt(row, np.array([row + 1], np.int32), f"p{row}", "src", "") for row in range(9)]}
        self.num_engines = num_engines
        self.engines = [SeedEngine() for _ in range(num_engines)]
        self.workers = [RolloutWorker(SingleTurnPlayer(e, Digits()), ParityRewarder(), prompts) for e in self.engines]  # type: ignore

    def run(self, tasks: Sequence[RolloutTask]) -> list[tuple[Any, RolloutScalars]]:
        return [self.workers[i % self.num_engines].run(task) for i, task in enumerate(tasks)]


def validate(
    directory: Path, *, num_engines: int = 2, seed: int = 1, step: int = 4, **rollout: object
) -> tuple[RolloutScalars, list[dict[str, Any]], WorkerPool]:
    pool = WorkerPool(num_engines)
    config = RolloutConfig(max_response_tokens=9, **rollout)
    scalars = RolloutValidator(pool, NUM_PROMPTS, config, seed, directory, FAILURES).validate(step)
    records = [json.loads(line) for line in (directory / f"val_step_{step}.jsonl").read_text().splitlines()]
    return scalars, records, pool


SAMPLED = {"validation_temperature": 1.0, "validation_top_p": 0.7, "validation_samples": 3, "validation_min_p": 0.2}


def test_validator_samples_with_its_own_keys_in_prompt_order(tmp_path: Path) -> None:
    training = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "samples_per_prompt": 8}
    scalars, records, pool = validate(tmp_path, **training, **SAMPLED)
    requests = [request for engine in pool.engines for request in engine.requests]
    assert {request.sampling for request in requests} == {SamplingOptions(9, temperature=1.0, top_p=0.7, min_p=0.2)}
    assert len({request.seed for request in requests}) == len(requests)
    places = [(row, sample) for row in range(NUM_PROMPTS) for sample in range(3)]
    assert scalars.group_ids.tolist() == scalars.prompt_rows.tolist() == [row for row, _ in places]
    assert [(record["group"], record["sample"]) for record in records] == places
    assert [record["prompt"] for record in records] == [f"p{row}" for row, _ in places]
    assert [record["accuracy"] for record in records] == scalars.accuracies.tolist()
    right = [int(record["response"]) % 2 == 0 for record in records]
    assert scalars.accuracies.tolist() == right
    assert 0 < np.mean(right) < 1


def test_validator_responses_depend_on_the_run_seed_only(tmp_path: Path) -> None:
    def responses(**change: int) -> list[str]:
        return [record["response"] for record in validate(tmp_path, **change, **SAMPLED)[1]]

    expected = responses()
    for change in ({"num_engines": 3}, {"num_engines": 7}, {"step": 9}):
        assert responses(**change) == expected, change
    assert not {*expected} & {*responses(seed=2)}


def test_validator_greedy_default_joins_differing_score_parts(tmp_path: Path) -> None:
    scalars, records, pool = validate(tmp_path, temperature=1.0, samples_per_prompt=8)
    assert {r.sampling.temperature for engine in pool.engines for r in engine.requests} == {0.0}
    assert len(scalars.accuracies) == NUM_PROMPTS
    assert scalars.parts["right"].tolist() == scalars.accuracies.tolist()
    for row in range(NUM_PROMPTS):
        assert np.flatnonzero(~np.isnan(scalars.parts[f"of_row_{row}"])).tolist() == [row]
        assert records[row][f"of_row_{row}"] == scalars.parts[f"of_row_{row}"][row]


def test_validator_failures_are_recorded_before_the_error(tmp_path: Path) -> None:
    class Failing:
        def check(self, graded: Sequence[RolloutScalars], what: str, records: str) -> None:
            assert sum(len(part.rewards) for part in graded) == NUM_PROMPTS
            assert (tmp_path.parent / records.replace("rollouts", tmp_path.name)).exists()
            raise RewardError(what)

    config = RolloutConfig(max_response_tokens=9)
    validator = RolloutValidator(WorkerPool(2), NUM_PROMPTS, config, 1, tmp_path, Failing())
    with pytest.raises(RewardError, match=r"data\.val after step 4"):
        validator.validate(4)


def probe(task: RolloutTask) -> tuple[TrajectoryBuffers, RolloutScalars, list[GenerationRequest]]:
    """Run a probe on a worker with 5 prompts of 1 to 5 tokens; the longest one has its own temperature."""
    engine, own = SeedEngine(), {"temperature": 0.3}
    prompts = [
        Prompt(row, np.arange(row + 1, dtype=np.int32), "", "", "", sampling=own if row == 4 else None)
        for row in range(5)
    ]
    worker = RolloutWorker(SingleTurnPlayer(engine, Digits()), DeferredRewarder(), {PROBE: prompts})  # type: ignore
    buffers, scalars = worker.run(task)
    return buffers, scalars, engine.requests


def test_probe_takes_long_and_short_prompts_with_training_options() -> None:
    rollout = RolloutConfig(temperature=0.7, max_response_tokens=500, samples_per_prompt=8)
    buffers, scalars, requests = probe(probe_task(np.arange(1, 6), rollout, 1, 3))
    assert scalars.prompt_rows.tolist() == [4, 2, 0]
    assert [request.request_id for request in requests] == ["probe.0.0", "probe.1.0", "probe.2.0"]
    assert [request.sampling.temperature for request in requests] == [0.3, 0.7, 0.7]
    assert {request.sampling.max_response_tokens for request in requests} == {MAX_TOKENS}
    assert len(buffers.logp_rollout) == scalars.response_tokens.sum()


def test_probe_few_prompts_repeats_them_under_other_ids() -> None:
    task = probe_task(np.array([1, 2]), RolloutConfig(), 1, 5)
    assert task.records is None
    _, scalars, _ = probe(task)
    assert set(scalars.prompt_rows) == {0, 1}
    assert len(set(scalars.group_ids)) == 5
