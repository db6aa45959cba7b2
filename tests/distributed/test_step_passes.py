"""The forward passes that StepPasses lists, from which `plan` computes times, are the passes that ranks make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.algorithms.passes import StepPasses
from mcore_rl.config.algorithm import CorrectionConfig
from mcore_rl.config.schema import Config
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import ONE_MICROBATCH
from tests.distributed.launch import launch
from tests.tiny_models import write_tiny_model

EPOCHS = 2
REJECTED = CorrectionConfig(kind="reject", measure="second_moment", high=0.5)
CASES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "reinforce": {"policy_loss.name": "reinforce"},
    "rollout's log-probabilities": {"old_logp": "rollout"},
    "kl in the loss": {"kl.in_loss": 0.1},
    "kl in the reward": {"kl.in_reward": 0.1, "policy_loss.name": "reinforce"},
    "clip_cov": {"policy_loss.name": "clip_cov"},
    "high entropy": {"high_entropy_share": 0.5},
    "second moment": {"corrections": [REJECTED]},
    "real": {"policy_loss.name": "real"},
    "real with the rollout's log-probabilities": {"policy_loss.name": "real", "old_logp": "rollout"},
    "token baseline": {"advantage": "optimal_token_baseline"},
}


def _config(directory: str, keys: dict[str, Any]) -> Config:
    config = policy_batch.config(directory, {}, ONE_MICROBATCH)
    config.algorithm.policy_loss = type(config.algorithm.policy_loss)()
    config.trainer.update_epochs = EPOCHS
    for key, value in keys.items():
        *sections, name = key.split(".")
        owner = config.algorithm
        for section in sections:
            owner = getattr(owner, section)
        setattr(owner, name, value)
    return config


def _count(rank: int, directory: str) -> dict[str, int]:
    """Return the tokens of the forward passes of a step, by case."""
    return {name: _tokens_of_passes(_config(directory, keys)) for name, keys in CASES.items()}


def _tokens_of_passes(config: Config) -> int:
    actor = policy_batch.build_actor(config)
    counted = [0]
    for model in filter(None, (actor, actor.reference)):
        infer = model.infer

        def counting(batches: Any, *arguments: Any, infer: Any = infer) -> Any:
            counted[0] += sum(sum(batch.lengths) for batch in batches)
            return infer(batches, *arguments)

        model.infer = counting
    # The calls of trainer.update.update_models on the ranks.
    batch, _ = actor.recompute_logp(policy_batch.shares(actor) * EPOCHS, policy_batch.chunks())
    if actor.reference is not None:
        batch = actor.reference_logp(batch)
    if config.algorithm.kl.in_reward:
        batch, _ = actor.kl_penalties(batch, config.algorithm.kl.in_reward)
    if not actor.estimator.per_response:
        batch, _, _ = actor.estimate(batch, None)
    for index in range(len(batch.shares)):
        actor.update(batch, index)
    return counted[0]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, int]]:
    directory = tmp_path_factory.mktemp("passes") / "model"
    write_tiny_model(directory, "qwen3")
    (found,) = launch(_count, 1, str(directory))
    return str(directory), found


def _computed_tokens(samples: list[int]) -> int:
    """Count the tokens of samples up to their last predictor."""
    return sum(policy_batch.PROMPTS[sample] + int(policy_batch.trained(sample).nonzero()[0][-1]) for sample in samples)


@pytest.mark.parametrize("case", CASES)
def test_passes_of_a_step_are_those_of_the_plan(case: str, counted: tuple[str, dict[str, int]]) -> None:
    directory, found = counted
    passes = StepPasses.of(_config(directory, CASES[case]))
    first, later = map(_computed_tokens, policy_batch.UPDATES)
    every = first + later
    assert found[case] == (
        passes.later_updates * later
        + (passes.first_update + passes.before_first) * first
        + passes.before_later * (every * EPOCHS - first)
        + (passes.score_norms + passes.reference) * every
    )


def test_cases_have_every_pass_and_none(tmp_path: Path) -> None:
    """Check the test data: each kind of pass is in a case, and one case has none."""
    found = [vars(StepPasses.of(_config(str(tmp_path), keys))) for keys in CASES.values()]
    assert all(any(passes[name] for passes in found) for name in found[0])
    assert not any(found[1].values())
