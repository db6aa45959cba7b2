"""Memory of the rounded experts of quantisation-aware training."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.config.models import ActorConfig
from mcore_rl.planner.activations import Execution, StageActivations, stage_activations
from mcore_rl.planner.model_size import bound_rows
from mcore_rl.resolved.layout import model_arguments
from model_converters.mapping.layout import TrainLayout
from tests.tiny_models import tiny_fields

FIELDS = tiny_fields("qwen3_moe", num_hidden_layers=4, num_experts=8, moe_intermediate_size=64)
LAYOUT = TrainLayout(8, tp=2, pp=2, ep=2, etp=2)


def stage(group: int, **keys: object) -> StageActivations:
    actor = ActorConfig(quantization_aware=group, **keys)  # type: ignore[arg-type]
    run = Execution(actor, LAYOUT, 2, fused=False, cuda=False, imbalance=1.0, square_length=10)
    arguments = model_arguments(FIELDS, "model.hf_path")
    return stage_activations(arguments, 0, run, microbatches=5, largest_weight_elements=1)


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, 2 * 2),  # layers of the stage, for each of pp micro-batches in flight
        ({"recompute": "selective", "recompute_modules": ["moe"]}, 1),
        ({"recompute": "selective", "recompute_modules": ["mlp"]}, 2 * 2),
        ({"recompute": "full", "recompute_layers": 2}, 2),
        ({"recompute": "full"}, 1),
    ],
)
def test_rounded_experts_exist_until_the_backward_pass(keys: dict[str, object], layers: int) -> None:
    rows = [bound for bound in bound_rows(FIELDS, torch.bfloat16) if bound.expert is not None and bound.layer == 0]
    elements = sum(rows_ * columns for bound in rows for rows_, columns in bound.row.shapes)
    of_layer = elements / 4 * 2  # over ep and etp, in bfloat16
    rounded, plain = stage(32, **keys), stage(0, **keys)
    assert rounded.total_bytes - plain.total_bytes == layers * of_layer
    assert rounded.forward_only_bytes - plain.forward_only_bytes == of_layer
