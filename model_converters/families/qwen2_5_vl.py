"""Qwen2.5-VL: the text model of Qwen2 with a vision tower. Source: transformers models/qwen2_5_vl.

Most blocks of the tower attend within windows. The rotation's sections are blocks of a head.
"""

from __future__ import annotations

from dataclasses import replace

from model_converters.errors import ConversionError
from model_converters.families.dense import QWEN2
from model_converters.families.parts import vision
from model_converters.families.parts.hf_config import COMPUTED, HFConfig
from model_converters.families.parts.vision_family import with_tower

_SECTIONS = (16, 24, 24)
"""Default of transformers."""
_TEXT = replace(QWEN2, defaults={"head_dim": COMPUTED, "num_key_value_heads": 8})
_SGLANG_PATCH_VALUES = 1176
"""Constant of SGLang: two frames of 14 x 14 pixels. It takes patches of another size for finished features."""


def _check_sglang(config: HFConfig) -> None:
    values = vision.read_vision(config).patch_values
    if values != _SGLANG_PATCH_VALUES:
        raise ConversionError(
            f"config.json: vision_config gives patches of {values} numbers (patch_size, temporal_patch_size), but "
            f"SGLang 0.5.23 reads patches of {_SGLANG_PATCH_VALUES} only; set rollout.engine to vllm"
        )


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
    check_sglang=_check_sglang,
)
