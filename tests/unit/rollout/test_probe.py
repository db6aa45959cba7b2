"""Responses compared before training: real workers on engines that echo seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rewards.step_grading import DeferredRewarder
from mcore_rl.rollout.episodes.single_turn import SingleTurnPlayer
from mcore_rl.rollout.validator import MAX_TOKENS, PROBE, PromptProbe
from mcore_rl.rollout.worker import RolloutWorker
from mcore_rl.types import Prompt, RolloutTask
from tests.unit.rollout.test_validator import Digits, SeedEngine


class Pool:
    def __init__(self) -> None:
        self.engine = SeedEngine()
        own = {"temperature": 0.3}
        prompts = {
            PROBE: [
                Prompt(row, np.arange(row + 1, dtype=np.int32), "", "", "", sampling=own if row == 4 else None)
                for row in range(5)
            ]
        }
        self.worker = RolloutWorker(SingleTurnPlayer(self.engine, Digits()), DeferredRewarder(), prompts)  # type: ignore

    def probe(self, task: RolloutTask) -> dict[str, Any]:
        assert task.records is None
        return {"engine": self.worker.run(task)}


def test_probe_takes_long_and_short_prompts_with_training_options() -> None:
    pool = Pool()
    rollout = RolloutConfig(temperature=0.7, max_response_tokens=500, samples_per_prompt=8)
    [(buffers, scalars)] = PromptProbe(pool, np.arange(1, 6), rollout, seed=1).probe(3).values()
    assert scalars.prompt_rows.tolist() == [4, 2, 0]
    assert [request.request_id for request in pool.engine.requests] == ["probe.0.0", "probe.1.0", "probe.2.0"]
    sampling = [request.sampling for request in pool.engine.requests]
    assert [options.temperature for options in sampling] == [0.3, 0.7, 0.7]
    assert {options.max_response_tokens for options in sampling} == {MAX_TOKENS}
    assert len(buffers.logp_rollout) == scalars.response_tokens.sum()


def test_probe_few_prompts_repeats_them_under_other_ids() -> None:
    pool = Pool()
    [(_, scalars)] = PromptProbe(pool, np.array([1, 2]), RolloutConfig(), seed=1).probe(5).values()
    assert set(scalars.prompt_rows) == {0, 1}
    assert len(set(scalars.group_ids)) == 5
