"""HF directories and bound tables of tiny models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from model_converters.families import family_for
from model_converters.mapping.table import BoundRow, bind


def bound_rows(config: Mapping[str, object], dtype: torch.dtype = torch.float32) -> list[BoundRow]:
    return bind(family_for(config).rows(config), config, dtype)


def write_hf(directory: Path, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
