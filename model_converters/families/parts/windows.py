"""Sliding windows of attention, by layer, and rotation settings that differ between layers with and without one."""

from __future__ import annotations

from collections.abc import Sequence

from model_converters.errors import ConversionError
from model_converters.families.parts.arguments import TransformerArguments
from model_converters.families.parts.hf_config import HFConfig, integer, section

WINDOW, FULL = "sliding_attention", "full_attention"
"""Values of layer_types: attention to the last sliding_window tokens, and to all tokens."""


def layer_kinds(config: HFConfig, period: int) -> list[str]:
    """Return layer_types. If absent or null, every period-th layer attends to all tokens, and the others to a window.

    Raises: ConversionError for another number of layers, or for other values.
    """
    num_layers, kinds = integer(config, "num_hidden_layers"), config.get("layer_types")
    if kinds is None:
        return [FULL if layer % period == 0 else WINDOW for layer in range(1, num_layers + 1)]
    if not isinstance(kinds, list | tuple) or not {*kinds} <= {WINDOW, FULL} or len(kinds) != num_layers:
        raise ConversionError(
            f"config.json: layer_types {kinds!r} is not supported; it must have {WINDOW!r} or {FULL!r} for each of "
            f"the {num_layers} layers"
        )
    return list(kinds)


def window_arguments(config: HFConfig, kinds: Sequence[str]) -> TransformerArguments:
    """Return the arguments of sliding windows; empty if every layer attends to all tokens.

    Raises: ConversionError.
    """
    if WINDOW not in kinds:
        return {}
    # sliding_window counts a token itself, Megatron only the tokens before it. 1 marks a layer with a window.
    window = integer(config, "sliding_window")
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": [int(kind == WINDOW) for kind in kinds]}


def with_rotation_of(config: HFConfig, kind: str, base: str) -> HFConfig:
    """Return config.json with the rotation settings of one kind of layer as its only ones.

    rope_parameters has an object for each kind; rope_scaling adds to the one of FULL. base: top-level field with the
    base of this kind, if the object has none.

    Raises: ConversionError for settings that are not in such an object, or that name the rope type `type`.
    """
    nested = section(config, "rope_parameters")
    for key in nested.keys() - {WINDOW, FULL}:
        raise ConversionError(
            f"config.json: rope_parameters.{key} is not supported: rope_parameters of this family has one object for "
            f"{FULL!r} and one for {WINDOW!r}"
        )
    found = {**section(nested, kind), **(section(config, "rope_scaling") if kind == FULL else {})}
    if "type" in found:
        raise ConversionError("config.json: the rope type is not read from `type`; write rope_type")
    own = {"rope_theta": config[base], **found}
    others = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    return {**others, "rope_parameters": own}
