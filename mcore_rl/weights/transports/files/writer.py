"""Writing end of the file transport, in a trainer rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from mcore_rl.remote.file_systems import PARALLEL_FILES
from mcore_rl.remote.shared_folder import SharedFolder
from mcore_rl.weights.transports.files.manifest import FileFacts, data_name, encode, manifest_name
from mcore_rl.weights.transports.files.threads import CopyThreads
from mcore_rl.weights.transports.link import MessageTag

KEPT_TRANSFERS = 2
"""Files of this many transfers are kept, including the transfer that is being written."""


@dataclass(frozen=True)
class Written:
    """Transfer of a message that this process writes. `memory` must not change before the end of `wait_for_file`."""

    memory: torch.Tensor
    wait_for_file: Callable[[], FileFacts]

    def wait(self) -> None:
        """Block until the file is written. Raises: StorageError naming it."""
        self.wait_for_file()


class TransferWriter:
    """Writes the transfers of trainer rank `member`, one after the other: `put` its messages, then `finish`.

    Threads write the files, since one stream rarely fills a network. timeout_seconds: maximum wait for the next file.
    """

    def __init__(self, folder: SharedFolder, member: int, timeout_seconds: float) -> None:
        self._folder = folder
        self._member = member
        self._writing: CopyThreads[FileFacts] = CopyThreads(PARALLEL_FILES, timeout_seconds)
        self._removing: CopyThreads[None] = CopyThreads(1, timeout_seconds)
        self._transfer = 0
        self._files: dict[int, dict[str, Future[FileFacts]]] = {}
        """Files of the current transfer by buffer and name."""
        self._earlier: deque[list[str]] = deque()
        """Names of all files of each earlier transfer that still exists."""
        self._removals: list[Future[None]] = []

    def put(self, memory: torch.Tensor, tag: MessageTag) -> Written:
        """Begin to write a message in another thread."""
        if not self._files:
            self._remove_earlier()
        name = data_name(self._transfer, self._member, tag)
        written = self._writing.submit(partial(self._write, name, memoryview(memory.numpy()).cast("B")))
        self._files.setdefault(tag.buffer, {})[name] = written
        return Written(memory, partial(self._wait, name, written))

    def finish(self) -> None:
        """Write the manifests after all files, which makes the transfer visible.

        Raises: StorageError naming a file that cannot be written or removed in time.
        """
        if not self._files:  # this rank sends frozen weights only, and the transfer has none
            self._remove_earlier()
        names = []
        for buffer, files in self._files.items():
            content = encode({name: self._wait(name, written) for name, written in files.items()})
            manifest = manifest_name(buffer, self._transfer, self._member)
            self._wait(manifest, self._writing.submit(partial(self._write, manifest, memoryview(content))))
            names += [manifest, *files]
        for removal in self._removals:
            self._removing.wait(removal, f"{self._folder.url}: removal of an earlier update")
        self._earlier.append(names)
        self._files, self._removals = {}, []
        self._transfer += 1

    def close(self) -> None:
        """End all writes that have not begun. The folder is removed by the driver."""
        self._writing.close(wait=True)  # a file that appears later would stay behind
        self._removing.close(wait=True)

    def _wait(self, name: str, written: Future[FileFacts]) -> FileFacts:
        return self._writing.wait(written, f"{self._folder.url}/{name}")

    def _write(self, name: str, content: memoryview) -> FileFacts:
        self._folder.put(name, content)
        return FileFacts.of(content)

    def _remove_earlier(self) -> None:
        while len(self._earlier) >= KEPT_TRANSFERS:
            self._removals.append(self._removing.submit(partial(self._folder.remove, self._earlier.popleft())))
