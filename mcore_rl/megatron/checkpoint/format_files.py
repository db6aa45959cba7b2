"""Metadata files of Megatron's distributed checkpoint format, and the common state, which is not sharded.

Source: megatron.core.dist_checkpointing (0.16.1).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from mcore_rl.errors import CheckpointError
from mcore_rl.megatron import cpu

cpu.install()

from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # noqa: E402
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy  # noqa: E402
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME  # noqa: E402

CONFIG_FILE = "metadata.json"


def write_format_files(directory: str | Path, common: dict[str, Any] | None = None) -> list[str]:
    """Write metadata.json and the common state. Returns the file names.

    Raises: OSError.
    """
    strategy = get_default_save_sharded_strategy()
    torch.save(common or {}, Path(directory) / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig(strategy.backend, strategy.version), str(directory))
    return [COMMON_STATE_FNAME, CONFIG_FILE]


def read_common(directory: str | Path) -> dict[str, Any]:
    """Read the common state. Raises: CheckpointError if it is missing or cannot be read."""
    file = Path(directory) / COMMON_STATE_FNAME
    try:
        common = torch.load(file, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).split("\n", 1)[0]
        raise CheckpointError(f"{file} cannot be read: {reason}") from error
    if not isinstance(common, dict):
        raise CheckpointError(f"{file} contains a {type(common).__name__} instead of a dict")
    return common
