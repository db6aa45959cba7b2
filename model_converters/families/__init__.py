"""The registry of model families."""

from __future__ import annotations

from model_converters.errors import ConversionError
from model_converters.families.deepseek_v2 import DEEPSEEK_V2
from model_converters.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from model_converters.families.dense import LLAMA, QWEN2, QWEN3, SEED_OSS
from model_converters.families.ernie4_5_moe import ERNIE4_5_MOE
from model_converters.families.glm4_moe import GLM4_MOE
from model_converters.families.glm4_moe_lite import GLM4_MOE_LITE
from model_converters.families.gpt_oss import GPT_OSS
from model_converters.families.minimax_m2 import MINIMAX_M2
from model_converters.families.mixtral import MIXTRAL
from model_converters.families.parts.engine_fields import neutral_fields, refuse_for_engine
from model_converters.families.parts.engine_rotation import rotation_for_engines
from model_converters.families.parts.family import Family
from model_converters.families.parts.hf_config import HFConfig
from model_converters.families.qwen2_5_vl import QWEN2_5_VL
from model_converters.families.qwen2_moe import QWEN2_MOE
from model_converters.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_VL, QWEN3_5_VL_MOE
from model_converters.families.qwen3_moe import QWEN3_MOE
from model_converters.families.qwen3_next import QWEN3_NEXT
from model_converters.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from model_converters.families.refusals import REFUSED
from model_converters.text_model import reads_images

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        ERNIE4_5_MOE,
        GLM4_MOE,
        GLM4_MOE_LITE,
        GPT_OSS,
        KIMI_K2,
        LLAMA,
        MINIMAX_M2,
        MIXTRAL,
        QWEN2,
        QWEN2_5_VL,
        QWEN2_MOE,
        QWEN3,
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN3_5_VL,
        QWEN3_5_VL_MOE,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_VL,
        QWEN3_VL_MOE,
        SEED_OSS,
    )
}


def family_for(hf_config: HFConfig) -> Family:
    """Return the family of a configuration's model_type.

    Raises: ConversionError listing the supported families, or the missing features of a known unsupported one; also for
    a release with a text model inside, whose fields read_hf_config returns.
    """
    model_type = str(hf_config.get("model_type"))
    if reads_images(hf_config):
        raise ConversionError(
            f"model_type {model_type!r} without vision_config is a text model inside a release; convert it with "
            "python -m model_converters to-mcore, then to-hf, and use the result"
        )
    if model_type in REFUSED:
        refusal = REFUSED[model_type]
        raise ConversionError(
            f"model_type {model_type!r} ({refusal.models}) is not supported; missing: {'; '.join(refusal.missing)}"
        )
    if model_type not in FAMILIES:
        raise ConversionError(f"model_type {model_type!r} is not supported; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def missing_engine_fields(hf_config: HFConfig) -> dict[str, object]:
    """Return the fields that inference engines need and that transformers omits or writes as null in config.json.

    Raises: ConversionError as family_for.
    """
    fields = family_for(hf_config).engine_fields
    return {key: value for key, value in fields.items() if hf_config.get(key) is None}


def engine_overrides(hf_config: HFConfig) -> dict[str, object]:
    """Return fields of config.json to override for inference engines so that they compute the model of transformers.

    Raises: ConversionError as family_for.
    """
    family = family_for(hf_config)
    overrides = missing_engine_fields(hf_config) | neutral_fields(family, hf_config) | family.engine_values(hf_config)
    overrides |= rotation_for_engines(hf_config, family.model_arguments(hf_config).rotary)
    # Engines choose the implementation by `architectures`, transformers by model_type.
    if hf_config.get("architectures") not in (None, [family.architecture]):
        overrides["architectures"] = [family.architecture]
    return overrides


def check_for_engine(hf_config: HFConfig, engine: str) -> None:
    """Reject a configuration for which an engine (vllm, sglang) differs from transformers despite all overrides.

    Raises: ConversionError naming the field.
    """
    refuse_for_engine(family_for(hf_config), hf_config, engine)
