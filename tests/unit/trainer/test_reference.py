"""Rewards less their KL, the coefficient that follows it, and the steps of a refresh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mcore_rl.algorithms.kl_controller import KLController
from mcore_rl.trainer.reference import Reference
from mcore_rl.types import Batch, Mean

KL_OF_A_TOKEN = 0.25


class Actor:
    """Ranks that find the same KL in every token."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def refer(self, batch: Batch) -> dict[str, Any]:
        self.calls.append("refer")
        return {"of/annotation": Mean(1, 1)}

    def penalize(self, batch: Batch, coefficient: float) -> tuple[dict[str, Any], np.ndarray]:
        self.calls.append(f"penalize {coefficient:g}")
        tokens = batch.trained_tokens.astype(np.float32)
        return {"reward/kl": Mean(KL_OF_A_TOKEN * tokens.sum(), tokens.sum())}, coefficient * KL_OF_A_TOKEN * tokens

    def replace_advantages(self, batch: Batch, advantages: np.ndarray) -> Batch:
        self.calls.append("replace")
        return replace(batch, advantages=advantages)

    def refresh_reference(self) -> None:
        self.calls.append("refresh")


def batch() -> Batch:
    ints = np.zeros(4, np.int32)
    return Batch(
        chunks=(),
        chunk_ids=ints,
        rows=ints,
        group_ids=np.array([0, 0, 1, 1]),
        total_tokens=ints,
        trained_tokens=np.array([2, 4, 8, 0], np.int32),
        rewards=np.array([1, 0, 1, 1], np.float32),
        advantages=np.zeros(4, np.float32),
        loss_weights=np.ones(4, np.float32),
        dp_ranks=ints,
        updates=(np.arange(4),),
    )


def less_the_mean(groups: Any, rewards: np.ndarray) -> np.ndarray:
    assert groups == "groups"
    return rewards - rewards.mean()


def test_advantages_are_of_the_rewards_less_the_kl_of_the_whole_response() -> None:
    actor, given = Actor(), batch()
    found, metrics = Reference(KLController(0.5), less_the_mean).apply(actor, "groups", given)  # type: ignore[arg-type]
    rewards = np.array([1 - 0.25, 0 - 0.5, 1 - 1.0, 1])  # 0.5 * 0.25 a token
    assert found.advantages.tolist() == (rewards - rewards.mean()).tolist()
    assert found.rewards.tolist() == given.rewards.tolist()
    assert actor.calls == ["refer", "penalize 0.5", "replace"]
    assert metrics["reward/kl"].value == KL_OF_A_TOKEN
    assert metrics["reward/kl_coefficient"].value == 0.5


def test_the_step_has_the_coefficient_of_before_and_the_next_one_that_which_its_kl_made() -> None:
    actor, controller = Actor(), KLController(0.5, target=0.2, horizon=8)
    reference = Reference(controller, less_the_mean)
    coefficients = []
    for _ in range(2):
        _, metrics = reference.apply(actor, "groups", batch())  # type: ignore[arg-type]
        coefficients.append(metrics["reward/kl_coefficient"].value)
    assert coefficients == [0.5, pytest.approx(0.5 * (1 + 0.2 * 4 / 8))]  # 0.25 / 0.2 - 1 is cut at 0.2


def test_estimators_of_tokens_leave_the_batch_to_the_ranks() -> None:
    actor, given = Actor(), batch()
    found, metrics = Reference(KLController(0.5)).apply(actor, "groups", given)  # type: ignore[arg-type]
    assert found is given
    assert actor.calls == ["refer", "penalize 0.5"]
    assert "reward/kl" in metrics


def test_kl_in_the_loss_alone_asks_for_log_probabilities_only() -> None:
    actor, given = Actor(), batch()
    assert Reference().apply(actor, "groups", given) == (given, {"of/annotation": Mean(1, 1)})  # type: ignore[arg-type]
    assert actor.calls == ["refer"]


def test_it_is_refreshed_after_every_so_many_steps() -> None:
    actor = Actor()
    for every, steps in ((2, [2, 4]), (0, [])):
        refreshed = []
        for step in range(1, 6):
            actor.calls = []
            Reference(refresh_every_steps=every).refresh(actor, step)  # type: ignore[arg-type]
            refreshed += [step] * len(actor.calls)
        assert refreshed == steps
