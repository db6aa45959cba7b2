"""Typed access to config.json, and rejection of settings that a weight table cannot represent."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

import torch

from model_converters.errors import ConversionError
from model_converters.families.parts.quantization import (
    PACKED,
    REMEDY,
    method_of,
    packed_group,
    refuse_files,
    refuse_nested,
)
from model_converters.inputs import is_number, read_object
from model_converters.text_model import text_fields
from model_converters.vision_model import flat_fields

HFConfig = Mapping[str, object]
_ABSENT = "config.json has no "


def read_hf_config(path: Path | str) -> dict[str, object]:
    """Read config.json; `path` is an HF directory or the file itself. If the release also reads images, these are the
    fields of its text model, or, for a model that is trained with its vision tower, the flat form of vision_model.py.

    Raises: ConversionError naming the file if it is missing, not JSON, or has no model_type.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = read_object(path)
        refuse_files(path.parent)
    except FileNotFoundError:
        raise ConversionError(f"{path} does not exist; a model directory needs its config.json") from None
    if not isinstance(config.get("model_type"), str):
        raise ConversionError(f"{path} has no model_type")
    return text_fields(flat_fields(config))


COMPUTED = "its default"
"""Marker in a family's defaults: the default is computed from other fields."""


class ConfigWithDefaults(dict[str, object]):
    """config.json in which absent fields have the defaults of the family's configuration class in transformers.

    A null does not select the default: transformers rejects it or gives it another meaning. `nullable`: keys whose null
    the caller handles.

    defaults: field -> default, without COMPUTED ones.
    absent: the part of `defaults` whose fields config.json lacks.

    Raises: ConversionError naming any other field that is null.
    """

    def __init__(self, config: HFConfig, defaults: HFConfig, nullable: Collection[str]) -> None:
        for key, default in defaults.items():
            if key in config and config[key] is None and key not in nullable:
                raise ConversionError(f"config.json: {key} is null; set it, or remove it for {default}")
        self.defaults = {key: default for key, default in defaults.items() if default != COMPUTED}
        self.absent = {key: default for key, default in self.defaults.items() if key not in config}
        super().__init__({**self.absent, **config})

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Append transformers' default to an error of the block that names an absent field."""
        try:
            yield
        except ConversionError as error:
            message = str(error)
            named = [key for key in self.absent if re.search(rf"\b{re.escape(key)}\b", message)]
            # `require` has already stated the default if its message starts with _ABSENT.
            if not named or message.startswith(_ABSENT):
                raise
            notes = [f"{key} is absent; transformers' default is {json.dumps(self.absent[key])}" for key in named]
            raise ConversionError(f"{message} ({', '.join(notes)})") from error


_COUNT_SUFFIXES, _MAX_COUNT = ("_layers", "_experts"), 100_000
"""Limit of fields that count layers or experts: each has rows in the table, and a typo would exhaust the memory."""


def integer(config: HFConfig, *keys: str, default: int | None = None, minimum: int = 1) -> int:
    """Read a whole number of at least `minimum`. Further `keys` are other spellings of the first.

    `default` applies if the field is absent or null.

    Raises: ConversionError for another value, for spellings that differ, and for an absent field without default.
    """
    # A null first spelling counts as absent. A null second spelling is an error: transformers would use it.
    given = {key: config[key] for key in keys if key in config and (config[key] is not None or key != keys[0])}
    found: dict[str, int] = {}
    for key, value in given.items():
        if not _is_whole(value, minimum):
            raise ConversionError(
                f"config.json: {key} is {_shown(value)}; it must be a whole number of at least {minimum}"
            )
        if value > _MAX_COUNT and key.endswith(_COUNT_SUFFIXES):
            raise ConversionError(f"config.json: {key} is {value}; it must be at most {_MAX_COUNT}")
        found[key] = value
    if len(set(found.values())) > 1:
        both = " and ".join(f"{key} {value}" for key, value in found.items())
        raise ConversionError(f"config.json: {both} are two spellings of one size and differ; remove one of them")
    if found:
        return next(iter(found.values()))
    if default is None:
        raise ConversionError(f"config.json of this {config.get('model_type')} model lacks {keys[0]}")
    return default


def number(
    config: HFConfig, key: str, default: float | None = None, *, inside: str = "", positive: bool = False
) -> float:
    """Read a finite number of at least 0, or above 0 if `positive`. `default` applies to an absent field, not to null.

    inside: name of the object in config.json, if `config` is not its top level.

    Raises: ConversionError.
    """
    value = config.get(key, default)
    # JSON has integers beyond the range of floats.
    if is_number(value) and 0 <= value <= sys.float_info.max and (value > 0 or not positive):
        return float(value)
    wanted = "above 0" if positive else "that is at least 0"
    name = f"{inside}.{key}" if inside else key
    raise ConversionError(f"config.json: {name} is {_shown(value)}; it must be a number {wanted}")


def flag(config: HFConfig, key: str, default: bool = False) -> bool:
    """Read true or false. `default` applies to an absent field, not to null.

    Raises: ConversionError.
    """
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ConversionError(f"config.json: {key} is {_shown(value)}; it must be true or false")
    return value


def whole_numbers(config: HFConfig, key: str) -> list[int]:
    """Read a list of whole numbers; empty if the field is absent or null.

    Raises: ConversionError.
    """
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(_is_whole(item, 0) for item in value):
        raise ConversionError(f"config.json: {key} is {_shown(value)}; it must be a list of whole numbers")
    return list(value)


def section(config: HFConfig, key: str) -> HFConfig:
    """Read an object in config.json; empty if the field is absent or null.

    Raises: ConversionError.
    """
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConversionError(f"config.json: {key} is {_shown(value)}; it must be an object")
    return value


def _is_whole(value: object, minimum: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _shown(value: object) -> str:
    return "null" if value is None else repr(value)


def require(config: HFConfig, key: str, *supported: object, reason: str) -> None:
    """Reject a setting that changes the computation, unless it is absent or has one of the `supported` values.

    If the field is absent and transformers has a default for it, the default is checked and named in the message.

    Raises: ConversionError.
    """
    if key not in config:
        return
    value = config[key]
    # Compare types too: in Python 1 == True == 1.0.
    if any(type(value) is type(known) and value == known for known in supported):
        return
    defaults = config.defaults if isinstance(config, ConfigWithDefaults) else {}
    values = [json.dumps(known) for known in supported if known is not None or key in defaults]
    if isinstance(config, ConfigWithDefaults) and key in config.absent:
        raise ConversionError(
            f"{_ABSENT}{key}, and transformers' default {json.dumps(value)} is not supported: {reason}; set "
            f"{key} to {' or '.join(values)}"
        )
    # Suggest to remove the field only if its default is supported.
    leave_out = key not in defaults or defaults[key] in supported
    allowed = " or ".join([*values, *(["unset"] if leave_out else [])])
    raise ConversionError(f"config.json: {key} {json.dumps(value)} is not supported, only {allowed}: {reason}")


def weights_dtype(config: HFConfig) -> torch.dtype:
    """Return the dtype of the weights in config.json; bfloat16 by default."""
    # transformers 5 writes dtype, earlier versions torch_dtype.
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ConversionError(f"config.json: dtype {name!r} is not a torch dtype")
    return dtype


# Accepted values in quantization_config of FP8 weights. The other accepted keys concern activations or list modules.
_FP8_FIELDS: dict[str, tuple[object, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": ("float", "ue8m0", None),
    "modules_to_convert": (None, []),
}
_FP8_FREE = {"weight_block_size", "modules_to_not_convert", "ignored_layers", "dequantize"}


def fp8_block(config: HFConfig) -> tuple[int, int] | None:
    """Return the block size (rows, columns) of FP8 weights; None if the model has none.

    Raises: ConversionError naming any kind of quantisation other than FP8 blocks, INT4 groups and MXFP4 (see
    refuse_unsupported).
    """
    if int4_group(config) is not None:
        return None
    refuse_nested(config)
    quantised = section(config, "quantization_config")
    if not quantised or has_mxfp4(config):
        return None
    refused, remedy = f"config.json: quantization_config ({method_of(quantised)})", REMEDY
    if quantised.get("quant_method") != "fp8":
        raise ConversionError(f"{refused} is not supported; {remedy}")
    for key, value in quantised.items():
        if key in _FP8_FIELDS and value not in _FP8_FIELDS[key]:
            raise ConversionError(f"{refused}: {key} {value!r} is not supported; {remedy}")
        if key not in _FP8_FIELDS and key not in _FP8_FREE and value:
            raise ConversionError(f"{refused}: {key} is not supported; {remedy}")
    block = quantised.get("weight_block_size")
    if block is None:
        raise ConversionError(f"{refused} has no weight_block_size: one scale per tensor is not supported; {remedy}")
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(_is_whole(length, 1) for length in block):
        raise ConversionError(f"{refused}: weight_block_size {block!r} must be two whole numbers of at least 1")
    return block[0], block[1]


FULL_ATTENTION = ("full_attention",)
"""Values of layer_types for attention to all tokens."""


def has_mxfp4(config: HFConfig) -> bool:
    """Return whether config.json describes MXFP4 weights, which HFCheckpoint reads if the table has their places."""
    return section(config, "quantization_config").get("quant_method") == "mxfp4"


def int4_group(config: HFConfig) -> int | None:
    """Return the number of elements per scale of INT4 weights; None if the model has none.

    Raises: ConversionError naming a setting of compressed-tensors that is not supported.
    """
    refuse_nested(config)
    quantised = section(config, "quantization_config")
    return packed_group(quantised) if quantised.get("quant_method") == PACKED else None


def refuse_unsupported(config: HFConfig, layer_types: tuple[str, ...] = FULL_ATTENTION, *, mxfp4: bool = False) -> None:
    """Reject settings that no family supports, and MXFP4 weights unless `mxfp4`.

    These are quantisation other than FP8 blocks and INT4 groups, activations other than SiLU, sizes that differ between
    layers, and attention that is not causal or not over all tokens.

    layer_types: supported values in the list layer_types.

    Raises: ConversionError.
    """
    fp8_block(config)
    if has_mxfp4(config) and not mxfp4:
        raise ConversionError(f"config.json: quantization_config (mxfp4) is not supported for this family; {REMEDY}")
    require(config, "is_causal", True, reason="attention is causal; otherwise transformers attends in both directions")
    reason = "with it inference engines attend to chunks of the text; transformers and megatron attend to all tokens"
    require(config, "dual_chunk_attention_config", None, reason=reason)
    # Another activation needs the same weights, so only this check detects it.
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConversionError(f"config.json: hidden_act {activation!r} is not supported, only 'silu'")
    require(config, "per_layer_config", None, {}, reason="all layers of a table have the same sizes")
    _refuse_sliding_window(config, layer_types)


def _refuse_sliding_window(config: HFConfig, supported: tuple[str, ...]) -> None:
    """Reject models in which any layer attends to a window instead of all tokens."""
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list | tuple) or not all(isinstance(kind, str) for kind in layer_types):
            raise ConversionError(f"config.json: layer_types is {_shown(layer_types)}; it must be a list of names")
        others = sorted(set(layer_types) - set(supported))
        if others:
            names = " and ".join(map(repr, supported))
            raise ConversionError(f"config.json: layer_types {others} are not supported, only {names}")
    # Some families of transformers ignore layer_types. If sliding_window is absent, families with a window use their
    # own default; null means full attention.
    window = config.get("sliding_window", 4096)
    # transformers writes 0 for a Qwen2-MoE without windows.
    unused = type(window) is int and window == 0 and config.get("use_sliding_window") is False
    if window is not None and not unused:
        integer(config, "sliding_window", default=1)
    if flag(config, "use_sliding_window") and window is not None:
        raise ConversionError("config.json: use_sliding_window is not supported; set it to false for full attention")
