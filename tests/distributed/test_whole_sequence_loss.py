"""A loss over whole responses on context-parallel ranks, each with a part of the tokens: gradients equal plain torch on
transformers' model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult
from mcore_rl.types import Mean, merge_metrics
from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.tiny_models import checkpoint_tensors, write_tiny_model

SAMPLES = policy_batch.UPDATES[0]
TOKENS = 40  # several responses in one micro-batch


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
def reference(directory: str) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, mean ratio over responses, and gradients by HF name, in float64."""
    model = policy_batch.reference_model(directory)
    weights, advantages = policy_batch.loss_weights(SAMPLES).astype(float), policy_batch.advantages().astype(float)
    total, ratios = torch.zeros((), dtype=torch.float64), []
    for sample in SAMPLES:
        logp, entropy = policy_batch.reference_logp(model, sample)
        drift = torch.from_numpy(policy_batch.drift(sample)).double()
        ratio = (logp - logp.detach() - drift).mean().exp()
        tokens = -advantages[sample] * ratio * len(logp) - policy_batch.ENTROPY_COEFFICIENT * entropy.sum()
        total = total + weights[sample] * tokens
        ratios.append(float(ratio.detach()))
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return float(total.detach()), sum(ratios) / len(ratios), checkpoint_tensors(model, gradients)


@pytest.mark.parametrize("size", [1, 2])
def test_whole_sequence_loss_on_context_ranks_equals_transformers(size: int, directory: Path, reference: Any) -> None:
    expected_loss, expected_ratio, expected = reference
    ranks = launch(_worker, size, directory)
    assert sum(loss for loss, _, _ in ranks) == pytest.approx(expected_loss, rel=1e-5)
    ratio = merge_metrics([metrics for _, metrics, _ in ranks])["actor/ratio"]
    assert ratio.count == len(SAMPLES)
    assert ratio.value == pytest.approx(expected_ratio, rel=1e-5)
    gradients = policy_batch.assemble([pieces for _, _, pieces in ranks])
    errors = {name: float((gradients[name] - t).abs().max() / t.abs().max()) for name, t in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    # float32 sums in a different order; a gradient that stays on one rank causes an error of 1e-1.
    assert errors[worst] <= 1e-5, f"{worst}: {errors[worst]:.1e}"


def _worker(rank: int, directory: str) -> tuple[float, dict[str, Any], list[Any]]:
    import torch.distributed as dist

    from mcore_rl.megatron.roles.actor import MegatronActor

    size = dist.get_world_size()
    actor = MegatronActor(policy_batch.config(directory, {"cp": size}, TOKENS), rank, size, None)
    actor.objective = replace(actor.objective, loss=SequenceRatio())
    chunks = policy_batch.chunks()
    first, share = (policy_batch.share(samples, 0, 1) for samples in (policy_batch.UPDATES[1], SAMPLES))
    batch, _ = actor.recompute_logp([first, share], chunks)
    for sample, logp in batch.old_logp.items():
        logp += torch.from_numpy(policy_batch.drift(sample)[policy_batch.held(sample, actor.layout, rank)])
    _, reports = actor.accumulate_gradients(batch, 1, on_every_replica=True)
    with torch.no_grad():
        for parameter in actor.chunks[0].parameters():
            parameter.copy_(parameter.main_grad)
    metrics = merge_metrics([report.metrics for report in reports])
    return sum(report.loss for report in reports), metrics, policy_batch.hf_pieces(actor)
