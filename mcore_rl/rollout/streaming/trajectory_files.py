"""Trajectories in files of numbers only, so that loading them cannot execute code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.data.checksum import file_crc32
from mcore_rl.data.trajectories import join_rows, split_rows
from mcore_rl.types import SavedFile, TrajectoryBuffers
from model_converters.durable_files import durable_write

COUNTS = "counts"
"""Additional array in the file: number of trajectories of each buffer."""


def write_trajectories(path: Path, parts: Sequence[TrajectoryBuffers]) -> SavedFile:
    """Write at least one part durably; returns the file's name and checksum.

    Raises: OSError.
    """
    joined = join_rows(parts)
    columns = {field.name: getattr(joined, field.name) for field in fields(TrajectoryBuffers)}
    arrays: dict[str, Any] = {name: array for name, array in columns.items() if array is not None}
    arrays[COUNTS] = np.array([len(part.prompt_tokens) for part in parts], np.int64)
    with durable_write(path) as file:
        np.savez(file, **arrays)
    return saved_file(path)


def read_trajectories(path: Path) -> list[TrajectoryBuffers]:
    """Read the parts in order."""
    with np.load(path, allow_pickle=False) as arrays:
        given = {name: arrays[name] for name in arrays.files if name != COUNTS}
        return split_rows(TrajectoryBuffers(**given), arrays[COUNTS].tolist())


def saved_file(path: Path) -> SavedFile:
    """Return name, size and checksum of a written file.

    Raises: OSError.
    """
    crc = file_crc32(path)
    return SavedFile(path.name, crc.num_bytes, crc.value)
