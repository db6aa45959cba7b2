"""Adapter rows: supported modules, placement of the two matrices, and the written adapter directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.families.parts.adapter_rows import adapter_rows, default_targets, shared_with_experts
from model_converters.hf import shards
from model_converters.hf.adapter_writer import adapter_config, write_adapter
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement, local_shape, segments_of
from model_converters.mapping.table import BoundRow, Row, bind
from tests.tiny_models import tiny_fields
from tests.unit.converters.hf_models import bound_rows

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
RANK = 3
CONFIG = adapter_config(rank=3, alpha=6.0, rslora=False, target_modules=["q_proj"], base="/base")


def rows_of(kind: str, **changes: object) -> tuple[list[Row], dict[str, object]]:
    config = tiny_fields(kind, **changes)
    return family_for(config).rows(config), config


@pytest.mark.parametrize(
    ("kind", "changes", "targets"),
    [
        ("llama", {}, ATTENTION + MLP),
        ("qwen2", {}, ATTENTION + MLP),
        ("qwen3_moe", {}, ATTENTION),
        ("qwen3_moe", {"mlp_only_layers": [0]}, ATTENTION + MLP),
        ("mixtral", {}, ATTENTION),
        ("qwen2_moe", {}, ATTENTION + MLP),
        ("glm4_moe", {}, ATTENTION + MLP),
        ("deepseek_v3", {}, ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *MLP]),
        ("glm_moe_dsa", {}, ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *MLP]),
        ("deepseek_v3", {"q_lora_rank": None}, ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *MLP]),
    ],
)
def test_adapter_rows_default_targets_exclude_routed_experts(
    kind: str, changes: dict[str, object], targets: list[str]
) -> None:
    rows, _ = rows_of(kind, **changes)
    found = default_targets(rows)
    assert sorted(found) == sorted(targets)
    # Routed experts of Mixtral have other names. Experts of Qwen3-MoE share names with dense layers only if there are
    # dense layers.
    with_dense = ("glm4_moe", "glm_moe_dsa", "deepseek_v3", "qwen2_moe")
    shared = MLP if changes.get("mlp_only_layers") or kind in with_dense else []
    assert shared_with_experts(rows, found) == shared


@pytest.mark.parametrize(
    ("kind", "target", "why"),
    [
        ("qwen3_moe", "gate_proj", "gate_proj: only routed experts have it, and their grouped GEMMs"),
        ("qwen3_moe", "gate", "gate: routers are not linear layers"),
        (
            "qwen2_moe",
            "shared_expert_gate",
            "shared_expert_gate: the gate of the shared expert is a parameter",
        ),
        ("glm_moe_dsa", "wq_b", "wq_b: choices of an indexer have no gradient"),
        ("mixtral", "w1", "w1: only routed experts have it"),
        ("qwen3", "lm_head", "lm_head: embeddings are not matrix products, and the loss reads"),
        ("qwen3", "embed_tokens", "embed_tokens: embeddings are not matrix products"),
        ("qwen3", "q_norm", "q_norm: it is not a matrix"),
        ("qwen3", "qkv_proj", "qkv_proj: the model has no such module; choose from q_proj, k_proj, v_proj, o_proj"),
    ],
)
def test_adapter_rows_unsupported_target_raises_reason(kind: str, target: str, why: str) -> None:
    with pytest.raises(ConversionError, match=why):
        adapter_rows(rows_of(kind)[0], ["o_proj", target], RANK)


def held(kind: str, targets: list[str], layout: TrainLayout, rank: int, **changes: object) -> Iterator[object]:
    """Yield (adapter row, shard, num_shards, base row) for the adapters on a rank."""
    rows, config = rows_of(kind, **changes)
    base = bound_rows(config)
    bound = bind(adapter_rows(rows, targets, RANK), config, torch.float32)
    placement, by_name = Placement([*base, *bound], layout), {row.mcore: row for row in base}
    for row in bound:
        shard = placement.shard_at(row, layout.coordinates(rank))
        if shard is not None:
            yield row, *shard, by_name[row.mcore.rpartition(".adapter.")[0] + ".weight"]


def put_together(row: BoundRow, shard: int, num_shards: int, whole: dict[str, torch.Tensor]) -> torch.Tensor:
    local = torch.zeros(local_shape(row.row, num_shards))
    for part, start, local_start, length in segments_of(row.row, shard, num_shards):
        local.narrow(row.row.dim, local_start, length).copy_(whole[row.hf[part]].narrow(row.row.dim, start, length))
    return local


@pytest.mark.parametrize(
    ("kind", "targets", "layout", "changes"),
    [
        ("qwen3", [], TrainLayout(2, tp=2), {}),
        ("qwen3", [], TrainLayout(2, tp=2), {"num_key_value_heads": 1}),
        ("qwen3", ["q_proj", "v_proj", "up_proj"], TrainLayout(2, tp=2), {}),
        ("qwen3_moe", [], TrainLayout(4, tp=2, pp=2, ep=2), {}),
        ("deepseek_v3", [], TrainLayout(4, tp=2, pp=2, ep=2), {}),
    ],
)
def test_adapter_rows_product_equals_shard_of_whole_update(
    kind: str, targets: list[str], layout: TrainLayout, changes: dict[str, object]
) -> None:
    """The reference is the shard of whole modules' B A, divided like the weight; modules without adapter give zero."""
    seen: set[str] = set()
    for rank in range(layout.world_size):
        found = list(held(kind, targets, layout, rank, **changes))
        generator = torch.Generator().manual_seed(0)
        for (a, *a_shard, base), (b, *b_shard, _) in zip(found[::2], found[1::2], strict=True):
            modules = [name.removesuffix(".lora_A.weight") for name in a.hf]
            whole = {
                name: torch.randn(shape, generator=generator)
                for row in (a, b)
                for name, shape in zip(row.hf, row.row.shapes, strict=True)
            }
            seen |= whole.keys()
            update = {m: whole[f"{m}.lora_B.weight"] @ whole[f"{m}.lora_A.weight"] for m in modules}
            every = [f"base_model.model.{name.removesuffix('.weight')}" for name in base.hf]
            shapes = dict(zip(every, base.row.shapes, strict=True))
            num_shards = layout.tp if base.row.axis == "tp" else 1
            tp = layout.coordinates(rank).tp if num_shards > 1 else 0
            wanted = torch.zeros(local_shape(base.row, num_shards))
            for part, start, local_start, length in segments_of(base.row, tp, num_shards):
                source = update.get(every[part], torch.zeros(shapes[every[part]]))
                dim = base.row.dim
                wanted.narrow(dim, local_start, length).copy_(source.narrow(dim, start, length))
            local_a, local_b = put_together(a, *a_shard, whole), put_together(b, *b_shard, whole)
            product = torch.zeros_like(wanted)
            for part, _, local_start, length in segments_of(b.row, *b_shard):
                own = local_a[part * RANK : (part + 1) * RANK]
                product[local_start : local_start + length] = local_b[local_start : local_start + length] @ own
            torch.testing.assert_close(product, wanted)
    rows, config = rows_of(kind, **changes)
    assert seen == {name for row in bind(adapter_rows(rows, targets, RANK), config, torch.float32) for name in row.hf}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"]])
def test_adapter_rows_of_hf_tensors_have_one_module_each(kind: str, targets: list[str]) -> None:
    """The modules are the same as in Megatron's model: routers are not among them, whatever their name."""
    rows, config = rows_of(kind)
    fused = bind(adapter_rows(rows, targets, RANK), config, torch.float32)
    layout = TrainLayout(2, shard_parameters=True, hf_tensors=True)
    separate = bind(adapter_rows(rows, targets, RANK, layout), config, torch.float32)
    expected = {name: shape for row in fused for name, shape in zip(row.hf, row.row.shapes, strict=True)}
    # Without padding for modules that have no adapter.
    assert {row.hf[0]: local_shape(row.row, 1) for row in separate} == expected
    for row in separate:
        side = row.mcore[-1].upper()
        assert row.hf == (f"base_model.model.{row.mcore[: -len('.adapter.a')]}.lora_{side}.weight",)


def test_write_adapter_config_is_read_by_peft(tmp_path: Path) -> None:
    tensors = {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.randn(3, 8).bfloat16(),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.randn(4, 6).t()[:, :3],
    }
    write_adapter(tmp_path / "out", tensors, CONFIG)
    read = peft.PeftConfig.from_pretrained(tmp_path / "out")
    assert (read.r, read.lora_alpha, read.use_rslora, read.bias) == (3, 6, False, "none")
    assert (set(read.target_modules), read.base_model_name_or_path) == ({"q_proj"}, "/base")
    assert read.task_type == "CAUSAL_LM"
    assert set(json.loads((tmp_path / "out" / "adapter_config.json").read_text())) <= set(read.to_dict())
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_write_adapter_failure_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"base_model.model.q_proj.lora_A.weight": torch.zeros(3, 8)}

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shards, "write_exactly", fail)
        with pytest.raises(ConversionError, match=r"out cannot be written: .*No space left"):
            write_adapter(tmp_path / "out", tensors, CONFIG)
    assert list(tmp_path.iterdir()) == []
    write_adapter(tmp_path / "out", tensors, CONFIG)
    with pytest.raises(ConversionError, match="out exists already"):
        write_adapter(tmp_path / "out", tensors, CONFIG)
