"""Qwen2.5-VL: the text model of Qwen2 with a vision tower. Source: transformers models/qwen2_5_vl.

Most blocks of the tower attend within windows. The rotation's sections are blocks of a head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from model_converters.families.dense import QWEN2
from model_converters.families.parts import vision
from model_converters.families.parts.hf_config import COMPUTED
from model_converters.families.parts.vision_family import tower_arguments, tower_table

_SECTIONS = (16, 24, 24)
"""Default of transformers."""
QWEN2_5_VL = replace(
    QWEN2,
    model_type="qwen2_5_vl",
    build_rows=partial(tower_table, QWEN2, vision.qwen2_5_tower),
    build_arguments=partial(tower_arguments, QWEN2, _SECTIONS, interleaved=False),
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
