"""Settings of rotary position embedding, read from config.json in the same way as transformers 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from model_converters.errors import ConversionError
from model_converters.families.parts.hf_config import HFConfig, integer, number, section
from model_converters.families.parts.rotary_scaling import READERS, RopeFields, Scaling


@dataclass(frozen=True)
class RotarySettings:
    """Rotary position embedding of the first `fraction` of each head.

    scaling: rope type that changes the frequencies; None: unchanged.
    factor: factor on cosines and sines.
    max_tokens: longest sequence for which the rotation is exact, in tokens; None: any length.
    """

    base: float
    fraction: float = 1.0
    scaling: Scaling | None = None
    factor: float = 1.0
    max_tokens: int | None = None


ROPE_TYPES = tuple(READERS)
"""Rope types of families with grouped-query attention."""
_DEFAULT_BASE = 10_000.0
_FIELDS = {
    *("attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor", "mscale"),
    *("mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type"),
    *("truncate", "type"),
}
_OWN_FIELDS: Mapping[object, set[str]] = {"longrope": {"long_factor", "short_factor"}}
"""Fields that are accepted for a single rope type."""
# For these rope types transformers copies this top-level field of config.json into the object and overwrites its value.
_MOVED, _TYPES_OF_MOVED = "original_max_position_embeddings", ("llama3", "longrope", "yarn")


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


def rotary(
    config: HFConfig, head_dim: int, *, known: tuple[str, ...] = ROPE_TYPES, partial: bool = False
) -> RotarySettings:
    """Read base and scaling in the format of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters).

    head_dim: number of elements of a head that has positions.
    known: supported rope types.
    partial: whether the family rotates only partial_rotary_factor of each head (null: whole heads).

    Raises: ConversionError for rope types that are not in `known`, for fields that a rope type cannot have, and for
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
        if key not in _FIELDS | _OWN_FIELDS.get(rope_type, set()) and value is not None:
            raise ConversionError(f"config.json: {name}.{key} {value!r} is not supported; remove it")
    fraction = number(found, "partial_rotary_factor", 1.0, inside=name, positive=True)
    if fraction > 1 or (fraction != 1 and not partial):
        allowed = "at most 1" if partial else "1"
        raise ConversionError(f"config.json: partial_rotary_factor {fraction} is not supported, only {allowed}")
    theta = number(found, "rope_theta", inside=name, positive=True)
    fields = RopeFields(name, found, int(head_dim * fraction), integer(config, "max_position_embeddings"))
    return RotarySettings(theta, fraction, *READERS[str(rope_type)](fields))


def inverse_frequencies(rotary: RotarySettings, head_dim: int) -> torch.Tensor:
    """Return the radians per position of each pair of elements, in float32 and on the CPU.

    Shapes: -> [head_dim * fraction / 2].
    """
    # Only the first part of each head is rotated; pairs of elements share a frequency.
    rotated = int(head_dim * rotary.fraction)
    powers = rotary.base ** (torch.arange(0, rotated, 2, dtype=torch.float32, device="cpu") / rotated)
    return 1.0 / powers if rotary.scaling is None else rotary.scaling.frequencies(powers, rotary.base)
