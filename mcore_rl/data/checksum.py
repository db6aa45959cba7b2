"""CRC-32 of files, from bytes as they are written or read: the fastest checksum that Python has without a package."""

from __future__ import annotations

import zlib
from pathlib import Path

_BLOCK_BYTES = 1 << 22


class Crc32:
    """Sees bytes in order; `value` is the CRC-32 of all so far, `num_bytes` their number."""

    def __init__(self) -> None:
        self.value, self.num_bytes = 0, 0

    def update(self, data: bytes) -> None:
        self.value = zlib.crc32(data, self.value)
        self.num_bytes += memoryview(data).nbytes


def file_crc32(path: Path) -> Crc32:
    """Of the whole file.

    Raises: OSError.
    """
    crc = Crc32()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc.update(block)
    return crc
