"""Published models on hundreds of ranks, on the meta device.

The Megatron models of the ranks must match the weight table, and all ranks together must write every tensor of the
checkpoint exactly once. Two child processes simulate one rank after another on a fake process group.
"""

from __future__ import annotations

import json
import resource
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from model_converters.families import family_for
from model_converters.hf.quant import SCALE_SUFFIX, scale_shape
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import export_plan
from model_converters.mapping.table import BoundRow, bind
from tests.distributed.launch import launch
from tests.plans import assert_tiled, local_shapes_by_rank
from tests.selection import EVERY_TEST
from tests.unit.converters.test_published_moe import DEEPSEEK_V3, SHARED, expanded, published

CHILDREN = 2
STRIDE = CHILDREN * (1 if EVERY_TEST else 5)
"""Usually every fifth rank is checked; all pipeline stages and all tensor-parallel ranks are among them."""
UNEVEN = {"first_stage_layers": 3, "last_stage_layers": 2}
PROOFS: dict[str, tuple[str, int, dict[str, int]]] = {
    "DeepSeek-V3 tp1 pp16 ep32": ("DeepSeek-V3", 512, {"pp": 16, "ep": 32, **UNEVEN}),
    "DeepSeek-V3 tp8 pp16 ep8": ("DeepSeek-V3", 512, {"tp": 8, "pp": 16, "ep": 8, **UNEVEN}),
    "Qwen3-235B": (
        "Qwen--Qwen3-235B-A22B",
        128,
        {"tp": 2, "pp": 8, "ep": 16, "first_stage_layers": 11, "last_stage_layers": 11},
    ),
    "Kimi-K2": (
        "moonshotai--Kimi-K2-Instruct",
        128,
        {"pp": 8, "ep": 16, "first_stage_layers": 7, "last_stage_layers": 6},
    ),
    "Mixtral-8x22B": ("mistralai--Mixtral-8x22B-v0.1", 64, {"tp": 4, "pp": 4, "vpp": 2, "ep": 8, "etp": 2}),
    "GLM-4.5": ("glm-4.5-355b", 128, {"tp": 4, "pp": 8, "ep": 16, "first_stage_layers": 10, "last_stage_layers": 10}),
}
ON_DEMAND = ("DeepSeek-V3 tp1 pp16 ep32", "DeepSeek-V3 tp8 pp16 ep8", "Qwen3-235B", "Kimi-K2")
"""Cases that take 30 to 120 seconds each; the other cases cover their features."""
# Elements of all tensors except FP8 scales. The authors round them to 671B (685B with multi-token prediction, which
# repeats embedding and head), 235B, 1T, 141B and 355B.
ELEMENTS = {
    "DeepSeek-V3": 684_489_845_504,
    "Qwen--Qwen3-235B-A22B": 235_093_634_560,
    "moonshotai--Kimi-K2-Instruct": 1_026_408_232_448,
    "mistralai--Mixtral-8x22B-v0.1": 140_620_634_112,
    "glm-4.5-355b": 352_797_829_024,
}


def differences(start: int, config: dict[str, Any], layout: TrainLayout) -> tuple[list[str], int, int]:
    """Check every STRIDE-th rank from `start`; runs in a child process.

    Returns: (differences from the table, number of ranks, peak memory in bytes).
    """
    from mcore_rl.megatron.model.names import canonical_tensors
    from mcore_rl.megatron.model.sharded import meta_model

    dist.destroy_process_group()  # the model has other ranks
    bound = bound_rows(config)
    expected, dtypes = local_shapes_by_rank(bound, layout), {row.mcore: row.dtype for row in bound}
    found = []
    ranks = range(start, layout.world_size, STRIDE)
    for rank in ranks:
        with meta_model(config, layout, rank) as chunks:
            tensors = canonical_tensors(chunks)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != expected[rank]:
            found.append(f"rank {rank}: {sorted(set(shapes.items()) ^ set(expected[rank].items()))[:4]}")
        found += [f"rank {rank}: {name} is {t.dtype}" for name, t in tensors.items() if t.dtype != dtypes[name]]
        found += [f"rank {rank}: {name} is on {t.device}" for name, t in tensors.items() if not t.is_meta]
    return found, len(ranks), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def bound_rows(config: dict[str, Any]) -> list[BoundRow]:
    return bind(family_for(config).rows(config), config, torch.bfloat16)


@pytest.mark.parametrize(
    "proof", [pytest.param(proof, marks=[pytest.mark.on_demand] * (proof in ON_DEMAND)) for proof in PROOFS]
)
def test_published_model_ranks_match_table_and_write_once(proof: str) -> None:
    name, world_size, sizes = PROOFS[proof]
    config = published(name)
    layout = TrainLayout(world_size, **sizes)
    bound = bound_rows(config)
    plans = export_plan(bound, layout)
    assert_tiled(bound, plans)
    assert sum(prod(plan.shape) for plan in plans) == ELEMENTS[name]
    assert {piece.rank for plan in plans for piece in plan.pieces} == set(range(world_size))
    found = launch(differences, CHILDREN, config, layout)
    assert sum(ranks for _, ranks, _ in found) >= world_size * CHILDREN // STRIDE
    for problems, _, peak in found:
        assert not problems
        assert peak < 2 * 2**30


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the published table of tensors")
def test_deepseek_671b_every_published_tensor_is_claimed_once() -> None:
    """91,991 tensors, including FP8 scales and the multi-token-prediction layer."""
    published_rows = json.loads((SHARED / "tensor_tables" / "deepseek_v3_671b.json").read_text())["rows"]
    wanted = Counter()
    for row in published_rows:
        wanted.update((name, shape, row["dtype"]) for name, shape in expanded([row]).items())
    plans = export_plan(bound_rows(DEEPSEEK_V3), TrainLayout(512, pp=16, ep=32, **UNEVEN))
    fp8 = {name for row in bound_rows(DEEPSEEK_V3) if row.row.fp8 for name in row.hf}
    claimed = Counter()
    for plan in plans:
        dtype = "float8_e4m3fn" if plan.hf_name in fp8 else str(plan.dtype).removeprefix("torch.")
        claimed[plan.hf_name, plan.shape, dtype] += 1
        if plan.hf_name in fp8:
            claimed[plan.hf_name + SCALE_SUFFIX, scale_shape(plan.shape, (128, 128)), "float32"] += 1
    assert claimed == wanted
    assert claimed.total() == 91_991
    assert sum(prod(shape) for _, shape, _ in claimed) == 684_531_386_000


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the published index")
def test_mixtral_every_published_tensor_is_claimed_once() -> None:
    index = Path(SHARED / "hf_configs" / "mixtral-8x22b-layout.model.safetensors.index.json")
    content = json.loads(index.read_text())
    bound = bound_rows(published("mistralai--Mixtral-8x22B-v0.1"))
    plans = export_plan(bound, TrainLayout(64, tp=4, pp=4, vpp=2, ep=8, etp=2))
    check_complete(bound, list(content["weight_map"]))
    assert_tiled(bound, plans)
    num_bytes = sum(prod(plan.shape) * plan.dtype.itemsize for plan in plans)
    assert (len(plans), num_bytes) == (1_739, content["metadata"]["total_size"])
