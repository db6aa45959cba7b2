"""Writer of LoRA adapters in PEFT's format."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from model_converters.durable_files import sync, write_json
from model_converters.errors import ConversionError
from model_converters.hf.adapter_reader import CONFIG_NAME, WEIGHTS_NAME
from model_converters.hf.shards import write_tensors


@dataclass(frozen=True)
class LoraDescription:
    """Contents of adapter_config.json for adapters of one rank and scale."""

    rank: int
    alpha: float
    rslora: bool
    target_modules: Sequence[str]
    base: str

    def as_config(self) -> dict[str, object]:
        """Return the fields of adapter_config.json. Source: peft 0.21 LoraConfig."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "use_rslora": self.rslora,
            "target_modules": list(self.target_modules),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
        }


def write_adapter(directory: Path | str, tensors: Mapping[str, torch.Tensor], description: LoraDescription) -> None:
    """Write whole tensors by PEFT name. The directory is written under another name and renamed when complete.

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
        write_json(partial / CONFIG_NAME, description.as_config())
        sync(partial)
        os.rename(partial, target)
        sync(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConversionError(f"{target} cannot be written: {error}") from error
