"""Writing end of the file transport, in a trainer rank."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from functools import partial

import torch

from mcore_rl.remote.file_systems import PARALLEL_FILES
from mcore_rl.remote.shared_folder import SharedFolder
from mcore_rl.weights.transports.files.manifest import FileFacts, data_name, encode, manifest_name
from mcore_rl.weights.transports.files.threads import CopyThreads
from mcore_rl.weights.transports.link import MessageTag

KEPT_TRANSFERS = 2
"""Files of this many transfers are kept, including the transfer that is being written."""


class TransferWriter:
    """Writes the transfers of trainer rank `member`, one after the other: `put` its messages, then `finish`.

    Threads write the files, since one stream rarely fills a network.
    """

    def __init__(self, folder: SharedFolder, member: int) -> None:
        self._folder = folder
        self._member = member
        self._writing: CopyThreads[FileFacts] = CopyThreads(PARALLEL_FILES)
        self._removing: CopyThreads[None] = CopyThreads(1)
        self._transfer = 0
        self._files: dict[int, dict[str, Future[FileFacts]]] = {}
        """Files of the current transfer by buffer and name."""
        self._earlier: deque[list[str]] = deque()
        """Names of all files of each earlier transfer that still exists."""
        self._removals: list[Future[None]] = []

    def put(self, memory: torch.Tensor, tag: MessageTag) -> Future[FileFacts]:
        """Write a message in another thread. `memory` must not change before the result is there."""
        if not self._files:
            self._remove_earlier()
        name = data_name(self._transfer, self._member, tag)
        written = self._writing.submit(partial(self._write, name, memoryview(memory.numpy()).cast("B")))
        self._files.setdefault(tag.buffer, {})[name] = written
        return written

    def finish(self) -> None:
        """Write the manifests after all files, which makes the transfer visible.

        Raises: StorageError naming a file that cannot be written or removed.
        """
        names = []
        for buffer, files in self._files.items():
            content = encode({name: written.result() for name, written in files.items()})
            manifest = manifest_name(buffer, self._transfer, self._member)
            self._folder.put(manifest, memoryview(content))
            names += [manifest, *files]
        for removal in self._removals:
            removal.result()
        self._earlier.append(names)
        self._files, self._removals = {}, []
        self._transfer += 1

    def close(self) -> None:
        """End all writes that have not begun. The folder is removed by the driver."""
        self._writing.close(wait=True)  # a file that appears later would stay behind
        self._removing.close(wait=True)

    def _write(self, name: str, content: memoryview) -> FileFacts:
        self._folder.put(name, content)
        return FileFacts.of(content)

    def _remove_earlier(self) -> None:
        while len(self._earlier) >= KEPT_TRANSFERS:
            self._removals.append(self._removing.submit(partial(self._folder.remove, self._earlier.popleft())))
