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
from tests.distributed.gradient_oracle import accumulate, check_gradients, gradient_pieces, reference_update
from tests.distributed.launch import launch
from tests.tiny_models import write_tiny_model

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
    advantages = policy_batch.advantages().astype(float)

    def loss_of(sample: int, logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ratio = (logp - logp.detach() - torch.from_numpy(policy_batch.drift(sample)).double()).mean().exp()
        return -advantages[sample] * ratio * len(logp), ratio.detach()[None]

    return reference_update(directory, loss_of)


@pytest.mark.parametrize("size", [1, 2])
def test_whole_sequence_loss_on_context_ranks_equals_transformers(size: int, directory: Path, reference: Any) -> None:
    expected_loss, expected_ratio, expected = reference
    ranks = launch(_worker, size, directory)
    assert sum(loss for loss, _, _ in ranks) == pytest.approx(expected_loss, rel=1e-5)
    ratio = merge_metrics([metrics for _, metrics, _ in ranks])["actor/ratio"]
    assert ratio.count == len(policy_batch.UPDATES[0])
    assert ratio.value == pytest.approx(expected_ratio, rel=1e-5)
    check_gradients([pieces for _, _, pieces in ranks], expected)  # one that stays on one rank is off by 1e-1


def _worker(rank: int, directory: str) -> tuple[float, dict[str, Any], list[Any]]:
    import torch.distributed as dist

    from mcore_rl.megatron.roles.actor import MegatronActor

    size = dist.get_world_size()
    actor = MegatronActor(policy_batch.config(directory, {"cp": size}, TOKENS), rank, size, None)
    actor.objective = replace(actor.objective, loss=SequenceRatio())
    return *accumulate(actor), gradient_pieces(actor)
