"""Reading config.json, and refusing what a weight table cannot represent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_converters.errors import ConversionError

HFConfig = Mapping[str, Any]


def read_hf_config(path: Path | str) -> dict[str, Any]:
    """config.json of an HF directory, or the file itself.

    Raises: ConversionError naming the file when it is missing, not JSON, or names no model_type.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{path} does not exist; a model directory needs its config.json") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConversionError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConversionError(f"{path} has no model_type")
    return config


def integer(config: HFConfig, *keys: str, default: int | None = None) -> int:
    """The first of `keys` that is set, a whole number of at least 1."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConversionError(f"config.json: {key} is {value!r}; it must be a whole number of at least 1")
        return value
    if default is None:
        raise ConversionError(f"config.json of this {config.get('model_type')} model lacks {keys[0]}")
    return default


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding. `scaling_factor` is that of Llama 3.1, None for unscaled frequencies."""

    base: float
    scaling_factor: float | None = None


# megatron-core 0.16.1 takes the factor alone; these are fixed in its rotary embedding.
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def rotary(config: HFConfig, *, known: tuple[str, ...] = ("default",)) -> Rotary:
    """Base and scaling, from where transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) writes them.

    Raises: ConversionError for rope types that are not in `known`, for scaling that megatron cannot express and for
    partial rotation.
    """
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = nested.get("rope_type", nested.get("type", "default"))
    if rope_type not in known:
        names = " and ".join(repr(name) for name in known)
        raise ConversionError(f"config.json: rope type {rope_type!r} is not supported, only {names}")
    partial = nested.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial is not None and partial != 1:
        raise ConversionError(f"config.json: partial_rotary_factor {partial} is not supported, only 1")
    theta = nested.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ConversionError("config.json has neither rope_theta nor rope_parameters.rope_theta")
    return Rotary(float(theta), _llama3_factor(nested) if rope_type == "llama3" else None)


def _llama3_factor(scaling: Mapping[str, Any]) -> float:
    for key, fixed in _LLAMA3.items():
        if scaling.get(key) != fixed:
            raise ConversionError(
                f"config.json: rope scaling 'llama3' with {key} {scaling.get(key)} is not supported, only {fixed}"
            )
    factor = scaling.get("factor")
    if not isinstance(factor, int | float) or factor < 1:
        raise ConversionError(f"config.json: rope scaling 'llama3' has factor {factor!r}; it must be at least 1")
    return float(factor)


def refuse_unsupported(config: HFConfig) -> None:
    """Raises: ConversionError for what no table of ours represents yet: quantised weights, activations but silu."""
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else quantised
        raise ConversionError(
            f"config.json: quantization_config ({method}): quantised checkpoints cannot be read; use the bfloat16 one"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ConversionError(f"config.json: hidden_act {config['hidden_act']!r} is not supported, only 'silu'")


def refuse_sliding_window(config: HFConfig) -> None:
    """Raises: ConversionError when any layer attends to a window instead of all tokens."""
    layer_types = config.get("layer_types")
    if layer_types is not None:
        others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
        if others:
            raise ConversionError(f"config.json: layer_types {others} are not supported, only 'full_attention'")
    # Where the size of the window is absent, transformers has one of its own; null means full attention.
    elif config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None:
        raise ConversionError("config.json: use_sliding_window is not supported; set it to false for full attention")
