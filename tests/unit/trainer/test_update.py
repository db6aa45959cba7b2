"""Adaptive entropy bonus: each step's updates get the coefficient that the step before has set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.algorithms.entropy_controller import EntropyController
from mcore_rl.config import Config
from mcore_rl.trainer.update import update_models
from mcore_rl.types import BatchHandle, Mean, Metric
from tests.unit.rollouts import batch_of


class Actor:
    """Fake ranks whose policy has the given entropies, one per step. Records the coefficients of the updates."""

    def __init__(self, entropies: list[float]) -> None:
        self.entropies, self.coefficients = entropies, list[float | None]()

    def recompute_logp(self, batch: Any) -> BatchHandle:
        return BatchHandle(batch, key=1)

    def update(self, handle: BatchHandle) -> dict[str, Metric]:
        self.coefficients.append(handle.entropy_coefficient)
        return {"actor/entropy": Mean(self.entropies[len(self.coefficients) - 1] * 8, 8)}


def run_steps(entropies: list[float], controller: EntropyController | None) -> tuple[list[float | None], list[Any]]:
    """Return the coefficients that the ranks and the metrics have, by step."""
    config = Config()
    config.trainer.critic_warmup_steps = 0
    actor = Actor(entropies)
    run: Any = SimpleNamespace(
        config=config, actor=actor, critic=None, reference=None, teacher=None, entropy=controller
    )
    run.estimates_tokens, run.batch_of = False, lambda groups, step, version: batch_of([0])
    metrics = [update_models(run, [], step, 0) for step in range(1, len(entropies) + 1)]
    return actor.coefficients, [found.get("actor/entropy_coefficient") for found in metrics]


def test_update_passes_the_coefficient_of_the_step_before() -> None:
    coefficients, reported = run_steps([0.1, 0.3, 0.1, 0.1], EntropyController(0.01, 0.2, 0.005, 0.0, 1.0))
    assert coefficients == pytest.approx([0.01, 0.015, 0.0, 0.015])
    assert [metric.value for metric in reported] == coefficients


def test_update_after_a_resume_continues_the_coefficients() -> None:
    entropies = [0.1, 0.3, 0.1, 0.1, 0.3, 0.1]
    whole, _ = run_steps(entropies, EntropyController(0.01, 0.2, 0.005, 0.0, 1.0))
    for cut in range(1, len(entropies)):
        first, second = (EntropyController(0.01, 0.2, 0.005, 0.0, 1.0) for _ in range(2))
        before, _ = run_steps(entropies[:cut], first)
        second.load_state_dict(first.state_dict())
        after, _ = run_steps(entropies[cut:], second)
        assert before + after == whole


def test_update_without_controller_leaves_the_coefficient_to_the_ranks() -> None:
    assert run_steps([0.1, 0.3], None) == ([None, None], [None, None])
