"""Results of saving a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.types.json import JsonObject


@dataclass(frozen=True)
class SavedFile:
    """Checkpoint file: its path within the checkpoint, its size and the CRC-32 of its bytes."""

    name: str
    num_bytes: int
    crc32: int


@dataclass(frozen=True)
class SavedState:
    """Result of a save: the files of all ranks; `description` (layout, versions, tensors) is written as JSON."""

    files: tuple[SavedFile, ...]
    description: JsonObject
