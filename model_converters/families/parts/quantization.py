"""Detection of quantised releases, to reject them with the name of the method.

| indication | methods |
|---|---|
| `quantization_config.quant_method` of config.json, of its text_config, or `compression_config` | all recent releases |
| `quantization` of config.json | mlx |
| other fields of that object | bitsandbytes, modelopt, compressed-tensors and torchao before they wrote quant_method |
| `hf_quant_config.json` | modelopt (NVFP4, FP8) |
| `quantize_config.json`, `quant_config.json` | gptq and awq before config.json had the object |
| names of tensors | releases without any of the above |

Supported are FP8 e4m3 in blocks (`quant_method` fp8; hf_config.fp8_block checks its fields) and INT4 groups of
compressed-tensors (packed_group).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from model_converters.errors import ConversionError
from model_converters.inputs import read_object

REMEDY = (
    "only FP8 e4m3 weights in blocks and INT4 groups of compressed-tensors are supported; use the bfloat16 checkpoint"
)
PACKED = "compressed-tensors"
"""quant_method of INT4 weights."""
_PACKED_WEIGHTS: dict[str, tuple[object, ...]] = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "dynamic": (False, None),
    "actorder": (None,),
}
"""Accepted values in the scheme of INT4 weights: scale * code, in groups of neighbouring elements of a row."""

_SECTIONS = ("quantization_config", "compression_config", "quantization")
_NESTED = ("text_config", "llm_config", "language_config")
# Fields that identify a method.
_FIELDS = {
    "load_in_8bit": "bitsandbytes",
    "load_in_4bit": "bitsandbytes",
    "bnb_4bit_quant_type": "bitsandbytes",
    "config_groups": "compressed-tensors",
    "quant_algo": "modelopt",
    "quant_type": "torchao",
    "w_bit": "awq",
    "desc_act": "gptq",
}
_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
_TENSORS = (
    (re.compile(r"\.(qweight|qzeros)$"), "gptq or awq"),
    (re.compile(r"\.weight\.(absmax|quant_map|quant_state\..*|nested_absmax)$|\.SCB$"), "bitsandbytes"),
    (re.compile(r"\.weight_packed$"), "compressed-tensors"),
    (re.compile(r"\.(weight_scale_2|input_scale)$"), "modelopt"),
    (re.compile(r"_proj_(blocks|scales)$"), "mxfp4"),
    (re.compile(r"\.weight_scale$"), "compressed-tensors, quark or fbgemm_fp8"),
)


def method_of(quantised: Mapping[str, object]) -> str:
    """Return the method that an object in config.json describes, followed by the algorithm if it names one."""
    named = quantised.get("quant_method")
    by_fields = next((method for field, method in _FIELDS.items() if quantised.get(field)), "unknown")
    method = named if isinstance(named, str) and named else by_fields
    detail = quantised.get("quant_algo") or quantised.get("format")
    return f"{method}, {detail}" if isinstance(detail, str) else method


def refuse_nested(config: Mapping[str, object]) -> None:
    """Reject quantisation settings other than the top-level quantization_config: engines read them, fp8_block does not.

    Raises: ConversionError.
    """
    # hf_config.fp8_block checks the top-level quantization_config.
    found = {key: config.get(key) for key in _SECTIONS if key != "quantization_config"}
    for section in _NESTED:
        inside = config.get(section)
        if isinstance(inside, Mapping):
            found |= {f"{section}.{key}": inside.get(key) for key in _SECTIONS}
    for where, quantised in found.items():
        if quantised:
            method = method_of(quantised) if isinstance(quantised, Mapping) else "unknown"
            method = "mlx" if method == "unknown" and where.endswith("quantization") else method
            raise ConversionError(f"config.json: {where} ({method}) is not supported; {REMEDY}")


def refuse_files(directory: Path) -> None:
    """Reject a directory with a separate file that describes quantised weights.

    Raises: ConversionError.
    """
    for name, method in _FILES.items():
        file = directory / name
        try:
            found = read_object(file)
        except FileNotFoundError:
            continue
        inside = found.get("quantization")
        described = inside if isinstance(inside, Mapping) else found
        algorithms = [described.get(key) for key in ("quant_algo", "kv_cache_quant_algo")]
        # A file without an algorithm describes a model that is not quantised.
        if name == "hf_quant_config.json" and not any(algorithms):
            continue
        shown = ", ".join([method, *(str(algorithm) for algorithm in algorithms if algorithm)])
        raise ConversionError(f"{file} ({shown}) describes quantised weights, which are not supported; {REMEDY}")


def refuse_tensors(names: Iterable[str], directory: Path) -> None:
    """Reject tensor names that only quantised releases have, although config.json names no method.

    Raises: ConversionError.
    """
    for name in names:
        for pattern, method in _TENSORS:
            if pattern.search(name):
                raise ConversionError(f"{directory}: {name} belongs to {method} weights, not supported; {REMEDY}")


def packed_group(quantised: Mapping[str, object]) -> int:
    """Return the number of elements per scale of INT4 weights in groups (compressed-tensors, format pack-quantized).

    The names of tensors determine which weights are quantised, not the `targets` and `ignore` of config.json.

    Raises: ConversionError naming the first setting with which the values would be others.
    """
    refused = f"config.json: quantization_config ({method_of(quantised)}) is not supported"
    remedy = "only INT4 in groups (pack-quantized, symmetric) is supported; use the bfloat16 checkpoint"
    if quantised.get("format") != "pack-quantized":
        raise ConversionError(f"{refused}: format {quantised.get('format')!r}; {remedy}")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if quantised.get(key):
            raise ConversionError(f"{refused}: {key} is set; {remedy}")
    groups = quantised.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    if len(schemes) != 1 or not isinstance(schemes[0], Mapping):
        raise ConversionError(f"{refused}: config_groups must have one scheme; {remedy}")
    weights = schemes[0].get("weights")
    for key in ("input_activations", "output_activations"):
        if schemes[0].get(key):
            raise ConversionError(f"{refused}: {key} are set; {remedy}")
    weights = weights if isinstance(weights, Mapping) else {}
    for key, accepted in _PACKED_WEIGHTS.items():
        if weights.get(key) not in accepted:
            raise ConversionError(f"{refused}: weights.{key} {weights.get(key)!r}; {remedy}")
    group = weights.get("group_size")
    if not isinstance(group, int) or group < 1:
        raise ConversionError(f"{refused}: weights.group_size {group!r} must be a whole number of at least 1")
    return group
