"""Recorded slices of stacked experts become slices of single experts, which fill an engine's parameters alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mcore_rl.engines.kept_slices import record, storage_key, unstacked
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.shard_map import ShardMap
from mcore_rl.weights.slices.stacked_parts import StackedParts, loaded_tensors
from model_converters.families import family_for
from model_converters.mapping.table import bind, exported_parts
from tests.tiny_models import tiny_fields

EXPERTS, SIZE = 8, 32
PREFIX = "model.layers.0.mlp.experts."


class FusedExperts:
    """Parameters of one layer, filled by the operations of vLLM's GptOssModel._load_weights_other (0.32)."""

    def __init__(self, rank: int, layout: EngineLayout) -> None:
        ranks, split = layout.tp, not layout.expert_parallel
        self._own = slice(None) if split else slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
        self._first, self._end = (rank * SIZE // ranks, (rank + 1) * SIZE // ranks) if split else (0, SIZE)
        held, inner = EXPERTS if split else EXPERTS // ranks, self._end - self._first
        shapes = {"w13": (held, 2 * inner, SIZE), "w2": (held, SIZE, inner), "w13_bias": (held, 2 * inner)}
        self.parameters = {name: torch.zeros(shape) for name, shape in shapes.items()} | {
            "w2_bias": torch.zeros(held, SIZE)
        }

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]], /) -> None:
        named, own, first, end = dict(weights), self._own, self._first, self._end
        gate_up = named[f"{PREFIX}gate_up_proj"][own][:, :, 2 * first : 2 * end]
        self.parameters["w13"].copy_(gate_up.permute(0, 2, 1).contiguous())
        down = named[f"{PREFIX}down_proj"][own][:, first:end, :]
        self.parameters["w2"].copy_(down.permute(0, 2, 1).contiguous())
        self.parameters["w13_bias"].copy_(named[f"{PREFIX}gate_up_proj_bias"][own][:, 2 * first : 2 * end])
        self.parameters["w2_bias"].copy_(named[f"{PREFIX}down_proj_bias"][own])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_unstacked_slices_fill_the_engines_parameters(expert_parallel: bool, rank: int) -> None:
    config = tiny_fields("gpt_oss", num_hidden_layers=1, hidden_size=SIZE, intermediate_size=SIZE)
    layout = EngineLayout.of_ranks(2, expert_parallel=expert_parallel, data_parallel_attention=False)
    shard_map = ShardMap(bind(family_for(config).rows(config), config, torch.float32), layout)
    whole = loaded_tensors(shard_map)
    assert tuple(whole[f"{PREFIX}gate_up_proj"].shape) == (EXPERTS, SIZE, 2 * SIZE)
    assert not any(f"{PREFIX}0." in name for name in whole)

    model = FusedExperts(rank, layout)
    places = {storage_key(tensor): ("experts", name) for name, tensor in model.parameters.items()}
    kept = unstacked(record(model, places, whole, "The engine"), StackedParts(shard_map.rows))
    boxes = {name: box for name, box in shard_map.boxes(rank).items() if name.startswith(PREFIX)}
    assert {each.name: ((each.start, each.size),) for each in kept} == boxes

    generator = torch.Generator().manual_seed(0)
    stacked = {name: torch.rand(tensor.shape, generator=generator) for name, tensor in whole.items()}
    expected = FusedExperts(rank, layout)
    expected.load_weights(iter(stacked.items()))
    parts = {part.part: part for row in shard_map.rows for part in exported_parts(row) if part is not None}
    for each in kept:
        part = parts[each.name]
        matrix = stacked[part.name][part.expert]
        rows = (matrix.T if part.place.transposed else matrix)[part.place.start :: part.place.step]
        box = rows[tuple(slice(a, a + n) for a, n in zip(each.start, each.size, strict=True))]
        model.parameters[each.parameter].as_strided(each.size, each.strides, each.offset).copy_(box)
    for name, tensor in expected.parameters.items():
        assert torch.equal(model.parameters[name], tensor), name
