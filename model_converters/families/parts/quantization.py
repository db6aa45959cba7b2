"""The names of quantisation methods, from everything that a release says about them.

| place | methods |
|---|---|
| `quantization_config.quant_method` of config.json, of its text_config, or `compression_config` | all recent releases |
| `quantization` of config.json | mlx |
| other fields of that object | bitsandbytes, modelopt, compressed-tensors and torchao before they wrote quant_method |
| `hf_quant_config.json` | modelopt (NVFP4, FP8) |
| `quantize_config.json`, `quant_config.json` | gptq and awq before config.json had the object |
| names of tensors | releases without any of the above |

FP8 e4m3 in blocks (`quant_method` fp8) is the one method that can be read; hf_config.fp8_block checks its fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from model_converters.errors import ConversionError
from model_converters.inputs.strict_json import read_object

REMEDY = "only FP8 e4m3 weights in blocks can be read; use the bfloat16 checkpoint"

_SECTIONS = ("quantization_config", "compression_config", "quantization")
_NESTED = ("text_config", "llm_config", "language_config")
# Fields that only one method has.
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


def method_of(quantised: Mapping[str, Any]) -> str:
    """The name of the method that an object of config.json describes, with the algorithm where it names one."""
    named = quantised.get("quant_method")
    method = named if isinstance(named, str) and named else _method_by_fields(quantised)
    detail = quantised.get("quant_algo") or quantised.get("format")
    return f"{method}, {detail}" if isinstance(detail, str) else method


def _method_by_fields(quantised: Mapping[str, Any]) -> str:
    return next((method for field, method in _FIELDS.items() if quantised.get(field)), "unknown")


def refuse_nested(config: Mapping[str, Any]) -> None:
    """Raises: ConversionError for a description of quantised weights that is not at the top of config.json, where
    engines find it and the reader of FP8 blocks does not."""
    for section in ("", *_NESTED):
        inside = config.get(section) if section else config
        if not isinstance(inside, Mapping):
            continue
        for key in _SECTIONS:
            if section == "" and key == "quantization_config":
                continue
            found = inside.get(key)
            if found:
                where = f"{section}.{key}" if section else key
                method = method_of(found) if isinstance(found, Mapping) else "unknown"
                method = "mlx" if key == "quantization" and method == "unknown" else method
                raise ConversionError(f"config.json: {where} ({method}) is not supported; {REMEDY}")


def refuse_files(directory: Path) -> None:
    """Raises: ConversionError for a file beside config.json that describes quantised weights."""
    for name, method in _FILES.items():
        file = directory / name
        try:
            found = read_object(file)
        except FileNotFoundError:
            continue
        inside = found.get("quantization")
        described = inside if isinstance(inside, Mapping) else found
        algorithms = [described.get(key) for key in ("quant_algo", "kv_cache_quant_algo")]
        if name == "hf_quant_config.json" and not any(algorithms):
            continue
        shown = ", ".join([method, *(str(algorithm) for algorithm in algorithms if algorithm)])
        raise ConversionError(f"{file} ({shown}) describes quantised weights, which are not supported; {REMEDY}")


def refuse_tensors(names: Iterable[str], directory: Path) -> None:
    """Raises: ConversionError for tensors that only a quantised release has, though config.json names no method."""
    for name in names:
        for pattern, method in _TENSORS:
            if pattern.search(name):
                raise ConversionError(f"{directory}: {name} is a tensor of {method} weights, not supported; {REMEDY}")
