"""Names of the files of a transfer, and the manifest: size and digest of each file of one sender for one buffer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.transports.link import MessageTag

DIGEST_BYTES = 16


class FileFacts(NamedTuple):
    """Size and digest (hexadecimal) of a file."""

    num_bytes: int
    digest: str

    @classmethod
    def of(cls, content: memoryview | bytes) -> FileFacts:
        return cls(memoryview(content).nbytes, hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest())

    def check(self, content: bytes, file: str) -> None:
        """Raises: WeightSyncError naming the file if its content has another size or digest."""
        if len(content) != self.num_bytes:
            raise WeightSyncError(f"{file} has {len(content)} bytes instead of {self.num_bytes}")
        if FileFacts.of(content) != self:
            raise WeightSyncError(f"{file} has another content than was written: its digest differs")


def data_name(transfer: int, sender: int, tag: MessageTag) -> str:
    return f"{tag.buffer}/{transfer}.{sender}.{tag.kind.name.lower()}.{tag.sync_round}"


def manifest_folder(buffer: int) -> str:
    return f"{buffer}/complete"


def manifest_name(buffer: int, transfer: int, sender: int) -> str:
    return f"{manifest_folder(buffer)}/{transfer}.{sender}.json"


def encode(files: Mapping[str, FileFacts]) -> bytes:
    """Return a manifest of files by name."""
    return json.dumps(files, indent=0).encode()


def decode(content: bytes, file: str) -> dict[str, FileFacts]:
    """Return the files of a manifest. Raises: WeightSyncError naming `file` if it is damaged."""
    try:
        return {str(name): FileFacts(int(size), str(digest)) for name, (size, digest) in json.loads(content).items()}
    except (ValueError, TypeError, AttributeError):
        raise WeightSyncError(f"{file} is damaged: it is not the manifest of a sender of weights") from None
