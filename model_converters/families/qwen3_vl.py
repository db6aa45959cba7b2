"""Qwen3-VL: text models of Qwen3 and Qwen3-MoE with a vision tower. Source: transformers models/qwen3_vl, qwen3_vl_moe.

Features of several depths of the tower (deepstack) are added behind the first decoder layers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from model_converters.families.dense import QWEN3
from model_converters.families.parts import family, vision
from model_converters.families.parts.hf_config import HFConfig
from model_converters.families.qwen3_moe import QWEN3_MOE
from model_converters.mapping.table import Row

_SECTIONS = (24, 20, 20)


def _rows(text: family.Family, config: HFConfig) -> list[Row]:
    return [*vision.language_rows(text.build_rows(config)), *vision.qwen3_tower(config)]


def _arguments(text: family.Family, config: HFConfig) -> family.ModelArguments:
    arguments = text.build_arguments(vision.without_sections(config))
    sections = vision.read_sections(config, _SECTIONS, arguments.transformer["kv_channels"] // 2)
    rotation: family.TransformerArguments = {"mrope_section": sections, "mrope_interleaved": True}
    return replace(
        arguments, transformer={**arguments.transformer, **rotation}, vision=vision.read_vision(config)
    )


_COVERS = "vision tower with deepstack, positions in time, height and width (images; videos are rejected)"
QWEN3_VL = replace(
    QWEN3,
    model_type="qwen3_vl",
    build_rows=partial(_rows, QWEN3),
    build_arguments=partial(_arguments, QWEN3),
    architecture="Qwen3VLForConditionalGeneration",
    own_fields=QWEN3.own_fields | vision.OWN_FIELDS,
    vllm_imports=("torchvision",),
    description=replace(
        QWEN3.description,
        models="Qwen3-VL 2B to 32B",
        covers=f"Qwen3's text model, {_COVERS}",
        vllm_cpu="not tried",
    ),
)
