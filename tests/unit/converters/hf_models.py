"""HF directories and bound tables of tiny models."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from model_converters.families import family_for
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.loader import load_tensors
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import local_shapes
from model_converters.mapping.table import BoundRow, bind


def bound_rows(config: Mapping[str, object], dtype: torch.dtype = torch.float32) -> list[BoundRow]:
    return bind(family_for(config).rows(config), config, dtype)


def write_hf(directory: Path, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a directory, read by the safetensors library."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def load_rank(
    checkpoint: HFCheckpoint,
    layout: TrainLayout,
    rank: int,
    bound: Sequence[BoundRow] | None = None,
    *,
    dropped: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Load a rank's float32 tensors, by default with the table of the checkpoint's config.json."""
    bound = bound or bound_rows(checkpoint.config)
    local = {name: torch.full(shape, torch.nan) for name, shape in local_shapes(bound, layout, rank).items()}
    load_tensors(checkpoint, bound, layout, rank, local, dropped=dropped)
    return local


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Compare names and values bit for bit."""
    assert set(found) == set(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
