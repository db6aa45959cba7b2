"""Writer of LoRA adapters in PEFT's format."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from model_converters.durable_files import sync, write_json
from model_converters.errors import ConversionError
from model_converters.hf.adapter_reader import CONFIG_NAME, WEIGHTS_NAME
from model_converters.hf.shards import write_tensors


def adapter_config(
    *, rank: int, alpha: float, rslora: bool, target_modules: Sequence[str], base: str
) -> dict[str, object]:
    """Return the contents of adapter_config.json for adapters of one rank and scale. Source: peft 0.21 LoraConfig."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": rslora,
        "target_modules": list(target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def write_adapter(directory: Path | str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, object]) -> None:
    """Write an adapter: whole tensors by PEFT name, and its configuration (see adapter_config).

    The directory is written under another name and renamed when complete.

    Raises: ConversionError if the directory exists and is not empty, or cannot be written.
    """
    target = Path(directory).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"{target} exists already; remove it or choose another directory")
    partial = target.with_name(f".{target.name}.partial")
    try:
        # Left behind by a process that was killed.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_tensors(partial / WEIGHTS_NAME, tensors)
        write_json(partial / CONFIG_NAME, config)
        sync(partial)
        os.rename(partial, target)
        sync(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConversionError(f"{target} cannot be written: {error}") from error
