"""Decoupled PPO with an interpolated proximal policy, on tokens of several weight versions: gradients equal plain torch
on transformers' model, and no forward pass precedes the updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_rl.megatron.step.objective import Objective
from mcore_rl.types import merge_metrics
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import accumulate, check_gradients, gradient_pieces, reference_update
from tests.distributed.launch import launch
from tests.tiny_models import write_tiny_model

CLIP = 0.3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3"))


@pytest.fixture(scope="module")
def reference(directory: str) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, mean weight of tokens, and gradients by HF name, in float64."""
    advantages = policy_batch.advantages().astype(float)

    def loss_of(sample: int, logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        trained = policy_batch.trained(sample).astype(bool)
        behave = torch.from_numpy(policy_batch.logp_rollout(sample)[trained]).double()
        behind = torch.from_numpy(policy_batch.VERSION - policy_batch.versions(sample)[trained]).double()
        proximal = behave + behind / (behind + 1) * (logp.detach() - behave)
        ratio, weight, a = (logp - proximal).exp(), (proximal - behave).exp(), advantages[sample]
        return -(weight * torch.minimum(a * ratio, a * ratio.clamp(1 - CLIP, 1 + CLIP))).sum(), weight

    return reference_update(directory, loss_of)


@pytest.mark.parametrize("parallel", [{}, {"cp": 2}, {"pp": 2}], ids=str)
def test_decoupled_ppo_interpolates_by_version_of_each_token(
    parallel: dict[str, int], directory: str, reference: Any
) -> None:
    expected_loss, expected_weight, expected = reference
    ranks = launch(_worker, 2 if parallel else 1, directory, parallel)
    assert sum(loss for loss, _, _ in ranks) == pytest.approx(expected_loss, rel=1e-5)
    metrics = merge_metrics([metrics for _, metrics, _ in ranks])
    assert metrics["actor/behave_weight"].value == pytest.approx(expected_weight, rel=1e-5)
    check_gradients([pieces for _, _, pieces in ranks], expected)


def _worker(rank: int, directory: str, parallel: dict[str, int]) -> tuple[float, dict[str, Any], list[Any]]:
    import torch.distributed as dist

    from mcore_rl.megatron.roles.actor import MegatronActor

    actor = MegatronActor(_config(directory, parallel), rank, dist.get_world_size(), None)
    return *accumulate(actor), gradient_pieces(actor)


def _config(directory: str, parallel: dict[str, int]) -> Any:
    config = policy_batch.config(directory, parallel, 40)
    loss = config.algorithm.policy_loss
    loss.name, loss.prox, loss.dual_clip = "decoupled_ppo", "loglinear", None
    loss.clip_low = loss.clip_high = CLIP
    return config


def test_actor_recomputes_logp_only_if_the_loss_needs_it(directory: str) -> None:
    [passes] = launch(_passes, 1, directory)
    assert passes == {"loglinear": 0, "metrics": 1, "a KL in the rewards": 1, "replay of the policy": 1}


def _passes(rank: int, directory: str) -> dict[str, int]:
    """Count the forward passes before the first of two updates."""
    from mcore_rl.megatron.roles.actor import MegatronActor

    actor = MegatronActor(_config(directory, {}), rank, 1, None)
    shares = [policy_batch.share(samples, 0, 1) for samples in policy_batch.UPDATES]
    infer, count = actor.infer, 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return infer(*args)

    actor.infer = counted  # type: ignore[method-assign]
    algorithm, actor_section = actor.config.algorithm, actor.config.actor
    cases = {
        "loglinear": actor.config,
        "metrics": replace(
            actor.config, algorithm=replace(algorithm, policy_loss=replace(algorithm.policy_loss, prox="metrics"))
        ),
        "a KL in the rewards": replace(
            actor.config, algorithm=replace(algorithm, kl=replace(algorithm.kl, in_reward=0.1))
        ),
        "replay of the policy": replace(
            actor.config,
            actor=replace(actor_section, moe=replace(actor_section.moe, router_replay="policy")),
        ),
    }
    found = {}
    for name, config in cases.items():
        actor.config, actor.objective, count = config, Objective.from_config(config, None), 0
        actor.recompute_logp(shares, policy_batch.chunks())
        found[name] = count
    return found
