"""Whether an engine's rank keeps what a plan, which knows no engine, would send it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.needs import Box, Needs
from model_converters.families import family_for
from model_converters.families.parts.hf_config import read_hf_config
from model_converters.mapping.table import bind


def require_planned(recorded: Mapping[str, Box], model_dir: str | Path, layout: EngineLayout, rank: int) -> None:
    """`recorded`: by HF name what the rank of an engine of this model was seen to take.

    Raises: WeightSyncError naming the first tensors that differ.
    """
    hf_config = read_hf_config(model_dir)
    rows = bind(family_for(hf_config).rows(hf_config), hf_config, torch.float32)  # only shapes count
    planned = Needs(rows, layout).boxes(rank)
    names = sorted(name for name in planned.keys() | recorded.keys() if planned.get(name) != recorded.get(name))
    if names:
        both = (f"{name}: {_said(recorded.get(name))}, not {_said(planned.get(name))}" for name in names[:4])
        raise WeightSyncError(
            f"of {len(names)} tensors the engine keeps another part on rank {rank} than planned: {'; '.join(both)}"
        )


def _said(box: Box | None) -> str:
    return "nothing" if box is None else f"{list(box[1])} from {list(box[0])}"
