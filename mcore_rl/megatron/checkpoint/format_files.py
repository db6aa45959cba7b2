"""Metadata files of Megatron's distributed checkpoint format, and the common state, which is not sharded.

Source: megatron.core.dist_checkpointing (0.16.1).
"""

from __future__ import annotations

import pickle
from dataclasses import asdict
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.optim.loss_scale import LossScaleState
from mcore_rl.types.json import JsonObject
from model_converters.mapping.layout import TrainLayout

CONFIG_FILE = "metadata.json"


def saved_layout(layout: TrainLayout) -> JsonObject:
    """Return the sizes of the axes, on which the random streams depend."""
    sizes = asdict(layout)
    # Streams do not depend on them, and checkpoints of earlier versions lack them.
    del sizes["shard_parameters"], sizes["hf_tensors"]
    return sizes


class CommonState(TypedDict):
    """State that all ranks share; a converted checkpoint has none. `scheduler`: state of the learning-rate schedule.
    `loss_scale`: state of a float16 model's scaler; checkpoints of earlier versions lack it."""

    layout: JsonObject
    adapters: dict[str, object] | None
    optimizer_updates: int
    scheduler: dict[str, object]
    loss_scale: NotRequired[LossScaleState | None]


def write_format_files(directory: str | Path, common: CommonState | None = None) -> list[str]:
    """Write metadata.json and the common state. Returns the file names.

    Raises: OSError.
    """
    strategy = get_default_save_sharded_strategy()
    torch.save(common or {}, Path(directory) / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig(strategy.backend, strategy.version), str(directory))
    return [COMMON_STATE_FNAME, CONFIG_FILE]


def read_common(directory: str | Path) -> CommonState:
    """Read the common state. Raises: CheckpointError if it is missing or cannot be read."""
    file = Path(directory) / COMMON_STATE_FNAME
    try:
        common: CommonState = torch.load(file, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).split("\n", 1)[0]
        raise CheckpointError(f"{file} cannot be read: {reason}") from error
    if not isinstance(common, dict):
        raise CheckpointError(f"{file} contains a {type(common).__name__} instead of a dict")
    return common
