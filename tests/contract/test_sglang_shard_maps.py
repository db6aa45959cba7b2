"""The slices that SGLang's weight loaders keep on each rank equal the shard map, for the layouts of engines."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from mcore_rl.engines.sglang.layout_arguments import layout_arguments
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.shard_map import Boxes, ShardMap
from model_converters.families import family_for
from model_converters.mapping.table import bind
from tests.contract.engines import SGLANG, WITH_SGLANG
from tests.readme import ROOT

pytestmark = WITH_SGLANG


@dataclass(frozen=True)
class Case:
    """A published model, an engine's layout and the ranks to compare. `extra`: further arguments of ServerArgs."""

    model: str
    layout: EngineLayout
    ranks: tuple[int, ...]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Any]:
        """The model's config.json with the first layers only: all others are equal to the last."""
        fields = json.loads((ROOT / "configs" / "models" / self.model / "config.json").read_text())
        dense = fields.get("first_k_dense_replace", 0)
        return fields | {"num_hidden_layers": dense + 1, "num_nextn_predict_layers": 0}

    @property
    def shard_map(self) -> ShardMap:
        fields = self.fields
        return ShardMap(bind(family_for(fields).rows(fields), fields, torch.bfloat16), self.layout)

    def to_json(self) -> dict[str, Any]:
        shapes = {
            name: shape for bound in self.shard_map.rows for name, shape in zip(bound.hf, bound.row.shapes, strict=True)
        }
        arguments = layout_arguments(self.layout, cuda=True) | self.extra
        return {"fields": self.fields, "arguments": arguments, "shapes": shapes, "ranks": self.ranks}


CASES = {
    "dense TP8": Case("Qwen2.5-32B", EngineLayout(8), (0, 7)),
    "slices of experts TP8, key-value heads copied": Case("Qwen3-235B-A22B", EngineLayout(8), (0, 3, 7)),
    "whole experts TP8 EP8": Case("Qwen3-235B-A22B", EngineLayout(8, expert_parallel=True), (0, 3, 7)),
    "attention DP8 EP8 DeepEP": Case("Qwen3-235B-A22B", EngineLayout(dp=8, expert_parallel=True), (0, 7)),
    "latent TP32": Case("DeepSeek-V3", EngineLayout(32), (0, 31)),
    "latent TP32, shared expert fused": Case(
        "DeepSeek-V3", EngineLayout(32), (0, 31), {"enforce_shared_experts_fusion": True}
    ),
    "latent TP32 EP32": Case("DeepSeek-V3", EngineLayout(32, expert_parallel=True), (0, 31)),
    "latent attention DP32 EP32 DeepEP": Case("DeepSeek-V3", EngineLayout(dp=32, expert_parallel=True), (0, 31)),
    "shared experts TP8": Case("GLM-4.5", EngineLayout(8), (0, 7)),
    "shared experts TP8 EP8": Case("GLM-4.5", EngineLayout(8, expert_parallel=True), (0, 7)),
    "shared experts attention DP8 EP8 DeepEP": Case("GLM-4.5", EngineLayout(dp=8, expert_parallel=True), (0, 7)),
}


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[dict[str, Boxes]]]:
    """Boxes of the compared ranks of all cases, from one process: its imports take longest."""
    given = json.dumps([case.to_json() for case in CASES.values()])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SGLANG_USE_CPU_ENGINE": "1"}
    command = [SGLANG, "-m", "tests.contract.sglang_records"]
    done = subprocess.run(command, input=given, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]
    return {
        name: [{name: ((tuple(start), tuple(size)),) for name, (start, size) in boxes.items()} for boxes in ranks]
        for name, ranks in zip(CASES, lines, strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_shard_map_equals_slices_that_sglang_keeps(name: str, recorded: dict[str, list[dict[str, Boxes]]]) -> None:
    case = CASES[name]
    shard_map = case.shard_map
    for rank, boxes in zip(case.ranks, recorded[name], strict=True):
        assert boxes == shard_map.boxes(rank)
