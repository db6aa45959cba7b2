"""Qwen2.5-VL: the text model of Qwen2 with a vision tower. Source: transformers models/qwen2_5_vl.

Most blocks of the tower attend within windows. The rotation's sections are blocks of a head.
"""

from __future__ import annotations

from dataclasses import replace

from model_converters.families.dense import QWEN2
from model_converters.families.parts import family, vision
from model_converters.families.parts.hf_config import COMPUTED, HFConfig
from model_converters.mapping.table import Row

_SECTIONS = (16, 24, 24)
"""Default of transformers."""


def _rows(config: HFConfig) -> list[Row]:
    return [*vision.language_rows(QWEN2.build_rows(config)), *vision.qwen2_5_tower(config)]


def _arguments(config: HFConfig) -> family.ModelArguments:
    arguments = QWEN2.build_arguments(vision.without_sections(config))
    sections = vision.read_sections(config, _SECTIONS, arguments.transformer["kv_channels"] // 2)
    rotation: family.TransformerArguments = {"mrope_section": sections}
    return replace(arguments, transformer={**arguments.transformer, **rotation}, vision=vision.read_vision(config))


QWEN2_5_VL = replace(
    QWEN2,
    model_type="qwen2_5_vl",
    build_rows=_rows,
    build_arguments=_arguments,
    defaults={"head_dim": COMPUTED, "num_key_value_heads": 8},
    architecture="Qwen2_5_VLForConditionalGeneration",
    own_fields=QWEN2.own_fields | vision.OWN_FIELDS,
    vllm_imports=("torchvision",),
    description=replace(
        QWEN2.description,
        models="Qwen2.5-VL 3B to 72B",
        covers="text model of Qwen2, vision tower with windows, positions in time, height and width (no videos)",
        vllm_cpu="not tried",
    ),
)
