"""What an engine was seen to take is held against the plan, tensor by tensor."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.needs import Box, Needs
from mcore_rl.weights.slices.recorded import require_planned
from model_converters.families import family_for
from model_converters.mapping.table import bind
from tests.tiny_models import tiny_fields

LAYOUT = EngineLayout(tp=2)
QUERIES = "model.layers.1.self_attn.q_proj.weight"


def planned(rank: int) -> dict[str, Box]:
    config = tiny_fields("qwen3_moe")
    return Needs(bind(family_for(config).rows(config), config, torch.float32), LAYOUT).boxes(rank)


def test_what_is_planned_passes() -> None:
    for rank in range(2):
        require_planned(planned(rank), planned(rank), rank)


def test_a_difference_names_tensor_and_rank() -> None:
    with pytest.raises(WeightSyncError, match=r"another part on rank 1.*from \[0, 0\], not .* from \[64, 0\]"):
        require_planned(planned(0), planned(1), 1)
    recorded = planned(0)
    del recorded[QUERIES]
    with pytest.raises(WeightSyncError, match=rf"of 1 tensors .* rank 0 .* {QUERIES}: nothing, not \[32, 32\]"):
        require_planned(recorded, planned(0), 0)
