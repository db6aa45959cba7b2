"""Reading config.json, and refusing what a weight table cannot represent."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def rotary_base(config: HFConfig) -> float:
    """rope_theta, from where transformers 4 (top level) or 5 (rope_parameters) writes it.

    Raises: ConversionError for rope types other than "default", for scaling and for partial rotation.
    """
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = nested.get("rope_type", nested.get("type", "default"))
    if rope_type != "default":
        raise ConversionError(f"config.json: rope type {rope_type!r} is not supported, only 'default'")
    partial = nested.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial is not None and partial != 1:
        raise ConversionError(f"config.json: partial_rotary_factor {partial} is not supported, only 1")
    theta = nested.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ConversionError("config.json has neither rope_theta nor rope_parameters.rope_theta")
    return float(theta)


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
    elif config.get("use_sliding_window") and config.get("sliding_window") is not None:
        raise ConversionError("config.json: use_sliding_window is not supported; set it to false for full attention")
