"""Losses by data source in one packed row: the gradient of every parameter equals float64 on transformers' model and
the sum of the parts that are computed alone, in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.algorithms import kl_penalty
from mcore_rl.config.algorithm import (
    AlgorithmConfig,
    KLConfig,
    ListedCorrectionConfig,
    PolicyLossConfig,
    SourceConfig,
    SourceLossConfig,
)
from mcore_rl.types import merge_metrics
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import ONE_MICROBATCH, SMALL, case_parameters, check_gradients, launch_cases
from tests.tiny_models import checkpoint_tensors, write_tiny_model

CASES: dict[int, dict[str, tuple[dict[str, int], int]]] = {
    1: {"one rank": ({}, ONE_MICROBATCH)},
    2: {"dp2": ({}, SMALL), "cp2": ({"cp": 2}, SMALL), "pp2": ({"pp": 2}, SMALL)},
}
SOURCE = "code"
LOSSES = (policy_batch.GROUPS == 1).astype(np.int32)
"""Loss of each sample: the prompt of samples 2 and 4 has another source than the prompt of samples 0, 6 and 8."""
CLIP, GSPO = {"clip_low": 0.2, "clip_high": 0.28}, {"clip_low": 0.05, "clip_high": 0.1}
IN_LOSS, BONUS = 0.3, 0.1
MOMENT: dict[str, Any] = {"kind": "reject", "measure": "second_moment", "high": 0.5, "policy": "current"}


def algorithm(default: dict[str, Any], own: dict[str, Any], entry: dict[str, Any], **others: Any) -> AlgorithmConfig:
    """Return settings with the loss `own` for SOURCE and `default` for the others."""
    of_source = SourceConfig(SOURCE, policy_loss=SourceLossConfig(**own), **entry)
    return AlgorithmConfig(
        policy_loss=PolicyLossConfig(**default),
        per_source=[of_source],
        entropy_coefficient=policy_batch.ENTROPY_COEFFICIENT,
        **others,
    )


COMBINED = {
    "oracle": algorithm(
        {"name": "ppo_clip"} | CLIP, {"name": "gspo"} | GSPO, {"kl_in_loss": IN_LOSS, "entropy_coefficient": BONUS}
    ),
    "groups": algorithm(
        {"name": "real", "tau": 0.5}, {"name": "real", "tau": 1.5}, {"entropy_coefficient": 0.0}, kl=KLConfig(0.2)
    ),
    "selections": algorithm(
        {"name": "kl_cov", "cov_ratio": 0.3},
        {"name": "clip_cov", "cov_ratio": 0.3, "cov_low": 0.0, "cov_high": 100.0},
        {},
        corrections=[ListedCorrectionConfig(**MOMENT)],
        high_entropy_share=0.6,
    ),
    "whole": algorithm({"name": "reinforce"}, {"name": "vespo"}, {}),
}
"""Settings by name, with two different losses each."""
# The largest difference measured was 1.5e-5, where parts of both sources nearly cancel; a token with the loss of the
# other source is off by 1e-2 or more.
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3"))


@pytest.fixture(scope="module")
def results(directory: str) -> dict[str, list[dict[str, Any]]]:
    """Results of all ranks, by case and settings: of both sources and, on one rank, of each source alone."""
    return launch_cases(_worker, CASES, directory)


def _worker(rank: int, directory: str, cases: dict[str, tuple[dict[str, int], int]]) -> dict[str, Any]:
    results = {}
    for case, (parallel, tokens) in cases.items():
        actor = policy_batch.build_actor(policy_batch.config(directory, parallel, tokens))
        results[case] = {name: _measure(actor, settings) for name, settings in COMBINED.items()}
    return results


def _measure(actor: Any, settings: AlgorithmConfig) -> list[tuple[float, dict[str, Any], list[Any]]]:
    from mcore_rl.megatron.step.microbatches import chosen_samples

    (share, _), (both, alone) = policy_batch.shares(actor), (settings, settings.loss_settings)
    share = replace(share, losses=LOSSES[share.samples])
    parts = [
        (each, replace(chosen_samples(share, share.losses == number), losses=None)) for number, each in enumerate(alone)
    ]
    parts[0] = replace(parts[0][0], per_source=[]), parts[0][1]
    measured = [(both, share), *parts] if torch.distributed.get_world_size() == 1 else [(both, share)]
    return [_gradients(actor, *part) for part in measured]


def _gradients(actor: Any, settings: AlgorithmConfig, share: Any) -> tuple[float, dict[str, Any], list[Any]]:
    """Compute a later update than the first: its old log-probabilities differ from the current ones by drift."""
    from mcore_rl.megatron.step.loss.rank_batch import RankBatch
    from mcore_rl.megatron.step.loss.trained_tokens import by_sample
    from mcore_rl.megatron.step.objective import Objective

    actor.objective = Objective.from_config(replace(actor.config, algorithm=settings), actor.group, actor.context)
    found = actor.infer(actor.microbatches(share, policy_batch.chunks()), actor.objective.outputs.logp_of)
    old = {
        sample: logp + torch.from_numpy(policy_batch.drift(sample)[policy_batch.held(sample, actor.layout, actor.rank)])
        for sample, logp in by_sample(found).items()
    }
    reference = {sample: 0.7 * logp - 0.2 for sample, logp in old.items()}
    with policy_batch.complete_gradients(actor):
        batch = RankBatch([share, share], policy_batch.chunks(), old, reference)
        _, reports = actor.accumulate_gradients(batch, 1)
    counts = actor.counts_tokens
    metrics = merge_metrics([report.metrics for report in reports]) if counts else {}
    return sum(report.loss for report in reports) * counts, metrics, policy_batch.gradient_pieces(actor)


def _joined(ranks: list[Any], name: str) -> list[tuple[float, dict[str, Any], dict[str, torch.Tensor]]]:
    """Join the ranks' results for settings: of both sources, of the first and of the second alone."""
    joined = []
    for part in zip(*(rank[name] for rank in ranks), strict=True):
        losses, metrics, pieces = zip(*part, strict=True)
        joined.append((sum(losses), merge_metrics(metrics), policy_batch.assemble(pieces)))
    return joined


@pytest.mark.parametrize("name", COMBINED)
@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_two_sources_have_the_sum_of_the_gradients_alone(size: int, case: str, name: str, results: Any) -> None:
    alone = _joined(results["one rank"], name)[1:]
    expected = {key: alone[0][2][key] + alone[1][2][key] for key in alone[0][2]}
    assert all(part[2]["model.embed_tokens.weight"].any() for part in alone)
    check_gradients([pieces for _, _, pieces in (rank[name][0] for rank in results[case])], expected, TOLERANCE)
    loss, metrics, _ = _joined(results[case], name)[0]
    assert loss == pytest.approx(alone[0][0] + alone[1][0], rel=1e-5, abs=1e-7)
    own = {key.removesuffix(f"/{SOURCE}"): m.value for key, m in metrics.items() if key.endswith(f"/{SOURCE}")}
    assert own == pytest.approx({key: alone[1][1][key].value for key in own}, rel=1e-4, abs=1e-5)
    assert own
    assert "actor/ppo_kl" in own or name == "whole"


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_clip_and_gspo_by_source_equal_transformers(size: int, case: str, results: Any, directory: str) -> None:
    loss, gradients = _reference(directory)
    assert _joined(results[case], "oracle")[0][0] == pytest.approx(loss, rel=1e-5)
    check_gradients([rank["oracle"][0][2] for rank in results[case]], gradients)


def _reference(directory: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Compute the update in float64: a clipped ratio per token for one source, GSPO with a KL term for the other."""
    model, samples = policy_batch.reference_model(directory), policy_batch.UPDATES[0]
    weights, total = policy_batch.loss_weights(samples).astype(float), torch.zeros((), dtype=torch.float64)
    for sample in samples:
        logp, entropy = policy_batch.reference_logp(model, sample)
        old, advantage = logp.detach() + torch.from_numpy(policy_batch.drift(sample)).double(), advantages()[sample]
        if LOSSES[sample]:
            ratio, bounds, bonus = (logp - old).mean().exp(), GSPO, BONUS
            more = IN_LOSS * kl_penalty(logp, 0.7 * old - 0.2, "low_var").sum()
        else:
            ratio, bounds, bonus, more = (logp - old).exp(), CLIP, policy_batch.ENTROPY_COEFFICIENT, 0.0
        bounded = ratio.clamp(1 - bounds["clip_low"], 1 + bounds["clip_high"])
        surrogate = torch.maximum(-advantage * ratio, -advantage * bounded).expand(len(logp)).sum()
        total = total + weights[sample] * (surrogate + more - bonus * entropy.sum())
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return float(total.detach()), checkpoint_tensors(model, gradients)


def advantages() -> np.ndarray:
    return policy_batch.advantages().astype(float)
