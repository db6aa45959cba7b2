"""Reading config.json, and refusing what a weight table cannot represent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
    except (OSError, ValueError, RecursionError) as error:
        raise ConversionError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConversionError(f"{path} has no model_type")
    return config


def integer(config: HFConfig, *keys: str, default: int | None = None) -> int:
    """The first of `keys` that is set, a whole number of at least 1."""
    for key in keys:
        value: int | None = config.get(key)
        if value is None:
            continue
        if not _is_size(value):
            raise ConversionError(f"config.json: {key} is {value!r}; it must be a whole number of at least 1")
        return value
    if default is None:
        raise ConversionError(f"config.json of this {config.get('model_type')} model lacks {keys[0]}")
    return default


def require(config: HFConfig, key: str, *expressed: Any, why: str) -> None:
    """Refuses, by name, a setting that changes the maths; `expressed` are the values that do not (None: not set).

    Raises: ConversionError.
    """
    value = config.get(key)
    if not any(value is known or (known is not None and value == known) for known in expressed):
        allowed = " or ".join("unset" if known is None else json.dumps(known) for known in expressed)
        raise ConversionError(f"config.json: {key} {json.dumps(value)} is not supported, only {allowed}: {why}")


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of the first `fraction` of each head. `scaling_factor` is that of Llama 3.1, None for
    unscaled frequencies."""

    base: float
    scaling_factor: float | None = None
    fraction: float = 1.0


# megatron-core 0.16.1 takes the factor alone; these are fixed in its rotary embedding.
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def rotary(config: HFConfig, *, known: tuple[str, ...] = ("default",), default_fraction: float | None = None) -> Rotary:
    """Base and scaling, from where transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) writes them.

    `default_fraction`: of each head that the family rotates when config.json does not say; None: it rotates all of it.

    Raises: ConversionError for rope types that are not in `known`, for scaling that megatron cannot express and for
    partial rotation in a family that has none.
    """
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = nested.get("rope_type", nested.get("type", "default"))
    if rope_type not in known:
        names = " and ".join(repr(name) for name in known)
        raise ConversionError(f"config.json: rope type {rope_type!r} is not supported, only {names}")
    fraction = nested.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if fraction is None:
        fraction = 1.0 if default_fraction is None else default_fraction
    if fraction != 1 and default_fraction is None:
        raise ConversionError(f"config.json: partial_rotary_factor {fraction} is not supported, only 1")
    theta = nested.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ConversionError("config.json has neither rope_theta nor rope_parameters.rope_theta")
    return Rotary(float(theta), _llama3_factor(nested) if rope_type == "llama3" else None, float(fraction))


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


def weights_dtype(config: HFConfig) -> torch.dtype:
    """The dtype that config.json gives the weights; bfloat16 when it names none."""
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ConversionError(f"config.json: dtype {name!r} is not a torch dtype")
    return dtype


# What quantization_config may say of FP8 weights; the other keys are about activations or only name modules.
_FP8_FIELDS: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": ("float", "ue8m0", None),
    "modules_to_convert": (None, []),
}
_FP8_FREE = {"weight_block_size", "modules_to_not_convert", "ignored_layers", "dequantize"}


def fp8_block(config: HFConfig) -> tuple[int, int] | None:
    """(rows, columns) of the blocks in which FP8 weights are scaled; None when nothing is quantised.

    Raises: ConversionError for every other kind of quantisation, by name.
    """
    quantised = config.get("quantization_config")
    if not quantised:
        return None
    if not isinstance(quantised, Mapping):
        raise ConversionError(f"config.json: quantization_config is {quantised!r}; it must be an object")
    method = quantised.get("quant_method", "unknown")
    refused = f"config.json: quantization_config ({method})"
    cure = "only FP8 e4m3 weights in blocks can be read; use the bfloat16 checkpoint"
    if method != "fp8":
        raise ConversionError(f"{refused} is not supported; {cure}")
    for key, value in quantised.items():
        if key in _FP8_FIELDS and value not in _FP8_FIELDS[key]:
            raise ConversionError(f"{refused}: {key} {value!r} is not supported; {cure}")
        if key not in _FP8_FIELDS and key not in _FP8_FREE and value:
            raise ConversionError(f"{refused}: {key} is not supported; {cure}")
    block = quantised.get("weight_block_size")
    if block is None:
        raise ConversionError(f"{refused} has no weight_block_size: one scale per tensor is not supported; {cure}")
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(_is_size(length) for length in block):
        raise ConversionError(f"{refused}: weight_block_size {block!r} must be two whole numbers of at least 1")
    return block[0], block[1]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def refuse_unsupported(config: HFConfig) -> None:
    """Raises: ConversionError for what no table of ours represents: quantisation but FP8 blocks, other activations."""
    fp8_block(config)
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
