"""Shard map of the model in a directory."""

from __future__ import annotations

from pathlib import Path

import torch

from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.shard_map import ShardMap
from model_converters.families import family_for
from model_converters.families.parts.hf_config import read_hf_config
from model_converters.mapping.table import bind


def model_shard_map(model_dir: str | Path, dtype: torch.dtype, layout: EngineLayout) -> ShardMap:
    """Return the shard map of an engine that runs the model in `model_dir`.

    Raises: LayoutError if the layout does not divide the model.
    """
    hf_config = read_hf_config(model_dir)
    return ShardMap(bind(family_for(hf_config).rows(hf_config), hf_config, dtype), layout)
