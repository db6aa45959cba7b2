"""Rotary position embedding in inference engines, compared with transformers: overrides, and rejected settings.

Sources: vLLM 0.32 (model_executor/layers/rotary_embedding), SGLang 0.5.23 (srt/layers/rotary_embedding). Both compute
llama3 like transformers. The other types differ as follows.

| rope type | difference | here |
|---|---|---|
| linear | a factor that is a whole number fails | given as a float |
| dynamic | SGLang scales positions within max_position_embeddings too | default: equal up to this length |
| yarn | fields with null or 0; one mscale without the other; SGLang ignores attention_factor | defaults; attn_factor |
| longrope | the factor on cosines follows max_position_embeddings only | short_mscale and long_mscale |

SGLang merges rope_parameters into the object of config.json, so leaving a field out would not remove it.
"""

from __future__ import annotations

from model_converters.errors import ConversionError
from model_converters.families.parts.arguments import ModelArguments
from model_converters.families.parts.family import Family
from model_converters.families.parts.hf_config import HFConfig
from model_converters.families.parts.rotary import RotarySettings, rope_section
from model_converters.families.parts.rotary_scaling import Linear, LongRope, Yarn

ROTATION_INSIDE = ("rope_dim", "use_fope", "mrope_section", "xdrope_section", "is_deepseek_v4")
"""Fields of rope_parameters that change the rotation in an engine and that transformers does not use."""
_RAMP = {"beta_fast": 32.0, "beta_slow": 1.0}
_MAGNITUDE = {"mscale": 1.0, "mscale_all_dim": 0.0}
"""Defaults of yarn. Engines compute with 0, and fail for null."""


def rotation_for_engines(config: HFConfig, arguments: ModelArguments) -> dict[str, object]:
    """Return the rope_parameters with which engines compute like transformers; {} if config.json has them already, or
    has one object per layer type, which Family.check_vllm checks.

    arguments: the family's arguments for `config`.
    """
    if arguments.window_rotary is not None:
        return {}
    rotary = arguments.rotary
    _, found = rope_section(config)
    wanted = {**found, **_changes(found, rotary)}
    # transformers then rotates whole heads; engines have defaults of their own.
    if config.get("partial_rotary_factor", rotary.fraction) is None:
        wanted.setdefault("partial_rotary_factor", rotary.fraction)
    if wanted.get("attention_factor", 1.0) is None:
        del wanted["attention_factor"]
    return {} if wanted == found and _typed(wanted) == _typed(found) else {"rope_parameters": wanted}


def _typed(fields: HFConfig) -> dict[str, type]:
    # In Python 4 == 4.0.
    return {key: type(value) for key, value in fields.items()}


def _changes(found: HFConfig, rotary: RotarySettings) -> dict[str, object]:
    """Return the fields of rope_parameters with another value than in config.json, or that it lacks."""
    scaling = rotary.scaling
    if found["rope_type"] == "dynamic":
        return dict.fromkeys(("rope_type", "type") if "type" in found else ("rope_type",), "default")
    if isinstance(scaling, Linear):
        return {"factor": scaling.factor}
    if isinstance(scaling, LongRope):
        return dict.fromkeys(("short_mscale", "long_mscale"), rotary.factor)
    if not isinstance(scaling, Yarn):
        return {}
    changes: dict[str, object] = {key: value for key, value in _RAMP.items() if key in found and not found[key]}
    if _MAGNITUDE.keys() & found.keys() and not (scaling.mscale and scaling.mscale_all_dim):
        changes |= _MAGNITUDE
    if rotary.factor != scaling.magnitude:
        changes["attn_factor"] = rotary.factor / scaling.magnitude
    return changes


def refuse_rotation(family: Family, config: HFConfig, engine: str) -> None:
    """Reject rotations that an engine computes differently from transformers despite rotation_for_engines.

    Raises: ConversionError.
    """
    if family.model_arguments(config).window_rotary is not None:
        return  # Family.check_vllm
    name, found = rope_section(config)
    for key in (key for key in ROTATION_INSIDE if key not in family.own_fields):
        # vLLM reacts to the presence of mrope_section, whatever its value.
        if found.get(key) or (key == "mrope_section" and key in found):
            raise ConversionError(
                f"config.json: {name}.{key} {found[key]!r} is not supported: it changes the rotation in inference "
                f"engines, but not in transformers' {family.model_type}; remove it"
            )
    rope_type = found["rope_type"]
    if found.get("type", rope_type) != rope_type:
        raise ConversionError(
            f"config.json: {name}.rope_type {rope_type!r} and {name}.type {found['type']!r} differ, which "
            "vLLM rejects; remove one of them"
        )
    if engine in family.unread_by_engines.get("rope_parameters", ()) and rope_type not in ("default", "dynamic"):
        raise ConversionError(
            f"config.json: {name}: rope type {rope_type!r} is not supported by {engine}, which computes "
            f"{family.model_type} without scaling"
        )
