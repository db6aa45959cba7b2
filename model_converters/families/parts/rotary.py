"""Settings of rotary position embedding, read from config.json in the same way as transformers 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from model_converters.errors import ConversionError
from model_converters.families.parts.hf_config import HFConfig, number, section


@dataclass(frozen=True)
class RotarySettings:
    """Rotary position embedding of the first `fraction` of each head.

    `scaling_factor` is the `factor` of Llama 3.1's rope scaling; None: frequencies are not scaled.
    """

    base: float
    scaling_factor: float | None = None
    fraction: float = 1.0


# megatron-core 0.16.1 accepts only the factor; these values are fixed in its rotary embedding.
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
_DEFAULT_BASE = 10_000.0
_FIELDS = {
    *("attention_factor", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim", "partial_rotary_factor"),
    *("rope_theta", "rope_type", "truncate", "type", *_LLAMA3),
}
# For these rope types transformers copies this top-level field of config.json into the object and overwrites its value.
_MOVED, _TYPES_OF_MOVED = "original_max_position_embeddings", ("llama3", "yarn")


def rope_section(config: HFConfig) -> tuple[str, dict[str, object]]:
    """Return the name and contents of the rotation settings: rope_scaling if present, else rope_parameters.

    transformers 4 wrote rope_scaling, and transformers 5 then ignores rope_parameters. Top-level `rope_theta` and
    `partial_rotary_factor` are added if the object has none.

    Raises: ConversionError if the field is not an object, or contains one object per layer type.
    """
    sections = {name: dict(section(config, name)) for name in ("rope_scaling", "rope_parameters")}
    name = "rope_scaling" if sections["rope_scaling"] else "rope_parameters"
    found = sections[name]
    for key, value in found.items():
        if isinstance(value, Mapping):
            raise ConversionError(f"config.json: {name}.{key} is an object: rotation per layer type is not supported")
    # Values inside the object take precedence over top-level fields.
    found.setdefault("rope_theta", config.get("rope_theta", _DEFAULT_BASE))
    if config.get("partial_rotary_factor") is not None:
        found.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    found.setdefault("rope_type", found.get("type", "default"))
    if _MOVED in config and found["rope_type"] in _TYPES_OF_MOVED:
        found[_MOVED] = config[_MOVED]
    return name, found


def rotary(config: HFConfig, *, known: tuple[str, ...] = ("default",), partial: bool = False) -> RotarySettings:
    """Read base and scaling in the format of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters).

    partial: whether the family rotates only partial_rotary_factor of each head (null: whole heads).

    Raises: ConversionError for rope types that are not in `known`, for scaling that Megatron does not support, and for
    partial rotation in other families.
    """
    name, found = rope_section(config)
    rope_type = found["rope_type"]
    if rope_type not in known:
        names = " and ".join(map(repr, known))
        key = "type" if found.get("type") == rope_type else "rope_type"
        raise ConversionError(f"config.json: {name}.{key}: rope type {rope_type!r} is not supported, only {names}")
    # Fields of other rope variants: transformers ignores them, but an engine may read them.
    for key, value in found.items():
        if key not in _FIELDS and value is not None:
            raise ConversionError(f"config.json: {name}.{key} {value!r} is not supported; remove it")
    fraction = number(found, "partial_rotary_factor", 1.0, inside=name, positive=True)
    if fraction > 1 or (fraction != 1 and not partial):
        allowed = "at most 1" if partial else "1"
        raise ConversionError(f"config.json: partial_rotary_factor {fraction} is not supported, only {allowed}")
    theta = number(found, "rope_theta", inside=name, positive=True)
    return RotarySettings(theta, _llama3_factor(found, name) if rope_type == "llama3" else None, fraction)


def inverse_frequencies(rotary: RotarySettings, head_dim: int) -> torch.Tensor:
    """Return the radians per position of each pair of elements, in float32.

    Shapes: -> [head_dim * fraction / 2].
    """
    # Only the first part of each head is rotated; pairs of elements share a frequency.
    rotated = int(head_dim * rotary.fraction)
    frequencies = 1.0 / rotary.base ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    if rotary.scaling_factor is None:
        return frequencies
    # Llama 3.1: keep frequencies with many turns over the original context, divide those with few by the factor, and
    # interpolate in between.
    turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rotary.scaling_factor


def _llama3_factor(found: HFConfig, name: str) -> float:
    for key, fixed in _LLAMA3.items():
        if found.get(key) is None or number(found, key, inside=name) != fixed:
            raise ConversionError(
                f"config.json: rope scaling 'llama3' with {key} {found.get(key)} is not supported, only {fixed}"
            )
    return scale_factor(found, name, "factor")


def scale_factor(found: HFConfig, name: str, key: str) -> float:
    """Read a required number of at least 1 from the scaling `found`, the object `name` of config.json.

    Raises: ConversionError.
    """
    factor = 0.0 if found.get(key) is None else number(found, key, inside=name)
    if factor < 1:
        kind = found["rope_type"]
        raise ConversionError(f"config.json: rope scaling {kind!r} has {key} {found.get(key)!r}; it must be at least 1")
    return factor
