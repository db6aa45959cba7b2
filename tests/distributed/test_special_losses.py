"""Losses that need more than old log-probabilities: decoupled PPO with an interpolated proximal policy on tokens of
several weight versions, alone and with the cross-entropy of observations, and a loss over whole responses on
context-parallel ranks. Gradients equal plain torch on transformers' model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult
from mcore_rl.megatron.step.objective import Objective
from mcore_rl.types import Mean, merge_metrics
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import (
    accumulate,
    case_parameters,
    check_gradients,
    launch_cases,
    reference_update,
)
from tests.distributed.launch import launch
from tests.tiny_models import write_tiny_model

CLIP = 0.3
CASES: dict[int, dict[str, dict[str, int]]] = {
    1: {"decoupled": {}, "whole": {}, "observed": {}},
    2: {"decoupled cp2": {"cp": 2}, "decoupled pp2": {"pp": 2}, "whole cp2": {"cp": 2}}
    | {"observed tp2": {"tp": 2}, "observed cp2": {"cp": 2}, "observed dp2": {}},
}
"""Layouts by number of ranks and name; the name begins with the loss."""
METRICS = {"decoupled": "actor/behave_weight", "whole": "actor/ratio", "observed": "actor/observation_loss"}
COEFFICIENT = 0.7


@dataclass(frozen=True)
class SequenceRatio:
    """Loss in which every token has the geometric mean of its response's ratios."""

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True, whole_sequence=True)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        assert inputs.old_logp is not None
        assert inputs.advantages is not None
        assert (inputs.mask.diff(dim=1) <= 0).all()  # one response per row, then padding
        ratio = (((inputs.logp - inputs.old_logp) * inputs.mask).sum(1) / inputs.mask.sum(1)).exp()
        metrics = {"ratio": Mean(float(ratio.detach().sum()), len(ratio))}
        return PolicyLossResult(-inputs.advantages * ratio[:, None] * inputs.mask, metrics)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3"))


@pytest.fixture(scope="module")
def references(directory: str) -> dict[str, tuple[float, float, dict[str, torch.Tensor]]]:
    """By loss: its value, mean of its metric, and gradients by HF name, in float64."""
    found = {name: reference_update(directory, loss) for name, loss in (("decoupled", _decoupled), ("whole", _whole))}
    return found | {"observed": reference_update(directory, _decoupled, _observed)}


def _decoupled(sample: int, logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    trained = policy_batch.trained(sample).astype(bool)
    behave = torch.from_numpy(policy_batch.logp_rollout(sample)[trained]).double()
    behind = torch.from_numpy(policy_batch.VERSION - policy_batch.versions(sample)[trained]).double()
    proximal = behave + behind / (behind + 1) * (logp.detach() - behave)
    ratio, weight, a = (logp - proximal).exp(), (proximal - behave).exp(), float(policy_batch.advantages()[sample])
    return -(weight * torch.minimum(a * ratio, a * ratio.clamp(1 - CLIP, 1 + CLIP))).sum(), weight


def _whole(sample: int, logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ratio = (logp - logp.detach() - torch.from_numpy(policy_batch.drift(sample)).double()).mean().exp()
    return -float(policy_batch.advantages()[sample]) * ratio * len(logp), ratio.detach()[None]


def _observed(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the weighted sum over responses of the mean cross-entropy of their tokens that were not sampled, and the
    cross entropies of responses with a weight. Tokens after the last sampled one do not count."""
    samples, found = policy_batch.UPDATES[0], {}
    for sample in samples:
        sampled = np.flatnonzero(policy_batch.trained(sample))
        observed = np.setdiff1d(np.arange(sampled[-1]), sampled)
        tokens = torch.from_numpy(policy_batch.sequence(sample).astype(np.int64))
        places = policy_batch.PROMPTS[sample] + observed
        log_p = torch.log_softmax(model(tokens[None]).logits[0][places - 1], -1)
        found[sample] = -log_p.gather(1, tokens[places][:, None])[:, 0]
    assert sorted(map(len, found.values()))[::4] == [0, 2]  # a response without an observation, too
    weights = policy_batch.observation_weights(samples).astype(float)
    terms = torch.stack([weights[sample] * losses.mean() for sample, losses in found.items() if len(losses)])
    counted = [losses for sample, losses in found.items() if weights[sample]]
    return COEFFICIENT * terms.sum(), torch.cat(counted).detach()


@pytest.fixture(scope="module")
def results(directory: str) -> dict[str, list[tuple[float, dict[str, Any], list[Any]]]]:
    """Loss, metrics and slices of gradients of all ranks, by case."""
    return launch_cases(_worker, CASES, directory)


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_special_loss_gradients_equal_transformers(size: int, case: str, results: Any, references: Any) -> None:
    name = case.split(maxsplit=1)[0]
    expected_loss, expected_metric, expected = references[name]
    ranks = results[case]
    assert sum(loss for loss, _, _ in ranks) == pytest.approx(expected_loss, rel=1e-5)
    metric = merge_metrics([metrics for _, metrics, _ in ranks])[METRICS[name]]
    assert metric.value == pytest.approx(expected_metric, rel=1e-5)
    if name == "whole":
        assert metric.count == len(policy_batch.UPDATES[0])
    check_gradients([pieces for _, _, pieces in ranks], expected)  # one that stays on one rank is off by 1e-1


def _worker(rank: int, directory: str, cases: dict[str, dict[str, int]]) -> dict[str, Any]:
    results = {}
    for name, parallel in cases.items():
        whole = name.startswith("whole")
        # 40 tokens: several responses in one micro-batch.
        config = policy_batch.config(directory, parallel, 40) if whole else _decoupled_config(directory, parallel)
        config.algorithm.observation_coefficient = COEFFICIENT * name.startswith("observed")
        actor = policy_batch.build_actor(config)
        if whole:
            (given,) = actor.objective.losses
            actor.objective = replace(actor.objective, losses=(replace(given, loss=SequenceRatio()),))
        results[name] = *accumulate(actor), policy_batch.gradient_pieces(actor)
    return results


def _decoupled_config(directory: str, parallel: dict[str, int]) -> Any:
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
    actor = policy_batch.build_actor(_decoupled_config(directory, {}))
    shares = policy_batch.shares(actor)
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
