"""Rewards minus the KL, the adaptive coefficient, and the steps with a refresh."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.algorithms.kl_controller import KLController
from mcore_rl.trainer.reference import Reference
from mcore_rl.types import BatchHandle, Mean
from tests.unit.rollouts import batch_of

KL_OF_A_TOKEN = 0.25


class Actor:
    """Fake ranks that compute the same KL for every token."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def reference_logp(self, handle: BatchHandle) -> BatchHandle:
        self.calls.append("reference")
        return replace(handle, metrics={"of/pass": Mean(1, 1)})

    def kl_penalties(self, handle: BatchHandle, coefficient: float) -> tuple[BatchHandle, np.ndarray]:
        self.calls.append(f"penalties {coefficient:g}")
        tokens = handle.batch.trained_tokens.astype(np.float32)
        kl = {"reward/kl": Mean(KL_OF_A_TOKEN * tokens.sum(), tokens.sum())}
        return replace(handle, metrics={**handle.metrics, **kl}), coefficient * KL_OF_A_TOKEN * tokens

    def with_advantages(self, handle: BatchHandle, advantages: np.ndarray) -> BatchHandle:
        self.calls.append("advantages")
        return replace(handle, batch=replace(handle.batch, advantages=advantages))

    def refresh_reference(self) -> None:
        self.calls.append("refresh")


def handle() -> BatchHandle:
    tokens, rewards = np.array([2, 4, 8, 0], np.int32), np.array([1, 0, 1, 1], np.float32)
    group_ids = np.array([0, 0, 1, 1])
    return BatchHandle(batch_of([0] * 4, group_ids=group_ids, trained_tokens=tokens, rewards=rewards), key=1)


def less_the_mean(groups: object, rewards: np.ndarray) -> np.ndarray:
    assert groups == "groups"
    return rewards - rewards.mean()


def test_reference_subtracts_kl_of_the_whole_response() -> None:
    actor, given = Actor(), handle()
    found = Reference(KLController(0.5), less_the_mean).apply(actor, "groups", given)  # type: ignore[arg-type]
    rewards = np.array([1 - 0.25, 0 - 0.5, 1 - 1.0, 1])  # 0.5 * 0.25 a token
    assert found.batch.advantages.tolist() == (rewards - rewards.mean()).tolist()
    assert found.batch.rewards.tolist() == given.batch.rewards.tolist()
    assert actor.calls == ["reference", "penalties 0.5", "advantages"]
    assert found.metrics["of/pass"] == Mean(1, 1)
    assert found.metrics["reward/kl"].value == KL_OF_A_TOKEN
    assert found.metrics["reward/kl_coefficient"].value == 0.5


def test_reference_new_coefficient_applies_to_the_next_step() -> None:
    actor, controller = Actor(), KLController(0.5, target=0.2, horizon=8)
    reference = Reference(controller, less_the_mean)
    coefficients = []
    for _ in range(2):
        found = reference.apply(actor, "groups", handle())  # type: ignore[arg-type]
        coefficients.append(found.metrics["reward/kl_coefficient"].value)
    assert coefficients == [0.5, pytest.approx(0.5 * (1 + 0.2 * 4 / 8))]  # 0.25 / 0.2 - 1 is cut at 0.2


def test_reference_per_token_estimator_keeps_the_batch() -> None:
    actor, given = Actor(), handle()
    found = Reference(KLController(0.5)).apply(actor, "groups", given)  # type: ignore[arg-type]
    assert found.batch is given.batch
    assert actor.calls == ["reference", "penalties 0.5"]
    assert "reward/kl" in found.metrics


def test_reference_loss_kl_needs_log_probabilities_only() -> None:
    actor, given = Actor(), handle()
    found = Reference().apply(actor, "groups", given)  # type: ignore[arg-type]
    assert found.batch is given.batch
    assert found.metrics == {"of/pass": Mean(1, 1)}
    assert actor.calls == ["reference"]


def test_reference_refresh_follows_the_interval() -> None:
    actor = Actor()
    for every, steps in ((2, [2, 4]), (0, [])):
        refreshed = []
        for step in range(1, 6):
            actor.calls = []
            Reference(refresh_every_steps=every).refresh(actor, step)  # type: ignore[arg-type]
            refreshed += [step] * len(actor.calls)
        assert refreshed == steps
