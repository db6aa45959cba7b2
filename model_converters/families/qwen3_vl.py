"""Qwen3-VL: text models of Qwen3 and Qwen3-MoE with a vision tower. Source: transformers models/qwen3_vl, qwen3_vl_moe.

Features of several depths of the tower (deepstack) are added behind the first decoder layers.
"""

from __future__ import annotations

from dataclasses import replace

from model_converters.errors import ConversionError
from model_converters.families.dense import QWEN3
from model_converters.families.parts import vision
from model_converters.families.parts.arguments import ModelArguments
from model_converters.families.parts.hf_config import COMPUTED, HFConfig, require
from model_converters.families.parts.vision_family import (
    tower_arguments,
    tower_table,
    with_tower,
)
from model_converters.families.qwen3_moe import QWEN3_MOE
from model_converters.mapping.table import Row

_SECTIONS = (24, 20, 20)
"""Default of transformers."""


def _moe_rows(config: HFConfig) -> list[Row]:
    return [_both_orientations(row) for row in tower_table(QWEN3_MOE, vision.qwen3_tower, config)]


def _both_orientations(row: Row) -> Row:
    """Let experts be stored as in the hub's files, [E, columns, rows], and as transformers 5 writes them."""
    if not row.num_experts:
        return row
    stored = tuple(replace(place, transposed=True, either_way=True) for place in row.stored)
    return replace(row, stored=stored, stacked_release=True, fp8=False)


def _moe_arguments(config: HFConfig) -> ModelArguments:
    require(config, "norm_topk_prob", True, reason="transformers normalises the weights of the chosen experts")
    return tower_arguments(QWEN3_MOE, _SECTIONS, {**config, "norm_topk_prob": True}, interleaved=True)


def _check_sglang(config: HFConfig) -> None:
    indexes = vision.deepstack_indexes(config)
    if indexes != sorted(indexes):
        raise ConversionError(
            f"config.json: vision_config.deepstack_visual_indexes {indexes} do not ascend, and SGLang 0.5.23 merges "
            "their features with the weights of other blocks then; set rollout.engine to vllm"
        )


_COVERS = "vision tower with deepstack, positions in time, height and width (no videos)"
# transformers' class has no sliding windows.
_TEXT = replace(QWEN3, own_fields=frozenset())
QWEN3_VL = with_tower(
    _TEXT,
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    tower=vision.qwen3_tower,
    sections=_SECTIONS,
    interleaved=True,
    models="Qwen3-VL 2B to 32B",
    covers=f"Qwen3's text model, {_COVERS}",
    vllm_cpu="runs",
    check_sglang=_check_sglang,
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    model_type="qwen3_vl_moe",
    build_rows=_moe_rows,
    build_arguments=_moe_arguments,
    defaults={"decoder_sparse_step": 1, "head_dim": COMPUTED, "num_key_value_heads": 16},
    engine_fields={"norm_topk_prob": True},
    architecture="Qwen3VLMoeForConditionalGeneration",
    own_fields=vision.OWN_FIELDS | {"decoder_sparse_step", "mlp_only_layers"},
    vllm_imports=("torchvision",),
    refused_by_engines={"sglang": "its images and weight updates are not tested for this model"},
    description=replace(
        QWEN3_MOE.description,
        models="Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
        covers=f"text model of Qwen3-MoE, {_COVERS}; experts stored as one tensor per layer, in both orientations",
        refused={**QWEN3_MOE.description.refused, "norm_topk_prob": False},
        vllm_cpu="runs",
    ),
)
