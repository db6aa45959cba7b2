"""CRC-32 of files, computed while they are written or read, and of tokens. It is the fastest checksum in the standard
library."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from mcore_rl.types import SavedFile

_BLOCK_BYTES = 1 << 22


class Crc32:
    """Incremental CRC-32: `value` is the checksum of all bytes so far, `num_bytes` their number."""

    def __init__(self) -> None:
        self.value, self.num_bytes = 0, 0

    def update(self, data: bytes) -> None:
        self.value = zlib.crc32(data, self.value)
        # len() of a memoryview counts items, which may have several bytes.
        self.num_bytes += memoryview(data).nbytes


def file_crc32(path: Path) -> Crc32:
    """Compute the CRC-32 of a whole file.

    Raises: OSError.
    """
    crc = Crc32()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc.update(block)
    return crc


def saved_file(directory: Path, name: str) -> SavedFile:
    """Describe a file of a checkpoint: its name, size and checksum.

    Raises: OSError.
    """
    crc = file_crc32(directory / name)
    return SavedFile(name, crc.num_bytes, crc.value)


def token_digest(token_ids: np.ndarray) -> int:
    """Return the CRC-32 of a prompt with its response, which identifies a response in the files of a step. Shapes:
    integer [S]."""
    return zlib.crc32(token_ids.astype(np.int32).tobytes())
