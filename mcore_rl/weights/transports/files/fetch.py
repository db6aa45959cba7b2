"""Reading end of the file transport, in an engine rank. Threads copy a transfer to memory while the engine
generates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial

from mcore_rl.errors import PeerLostError, WeightSyncError
from mcore_rl.remote.file_systems import PARALLEL_FILES
from mcore_rl.remote.shared_folder import SharedFolder
from mcore_rl.weights.transports.files.manifest import FileFacts, data_name, decode, manifest_folder, manifest_name
from mcore_rl.weights.transports.files.threads import CopyThreads
from mcore_rl.weights.transports.link import MessageTag

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 0.5
"""Pause after a listing without a new manifest: doubled each time, since an object store charges for listings."""

Files = dict[str, Future[bytes]]
"""Contents by name of the file."""


class Fetch:
    """Fetches transfer number `transfer` from `senders` to a staging buffer into this process's memory.

    name: name of a sender for messages. timeout_seconds: maximum wait for the next manifest, and for the next file.
    """

    def __init__(
        self,
        folder: SharedFolder,
        buffer: int,
        transfer: int,
        senders: Collection[int],
        *,
        name: Callable[[int], str],
        timeout_seconds: float,
    ) -> None:
        self._folder = folder
        self._buffer = buffer
        self._transfer = transfer
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._files: dict[int, Future[Files]] = {sender: Future() for sender in senders}
        self._closed = threading.Event()
        self._threads: CopyThreads[bytes] = CopyThreads(PARALLEL_FILES, timeout_seconds)
        # A daemon, as the threads that copy files.
        threading.Thread(target=self._run, name="fetch weights", daemon=True).start()

    def take(self, sender: int, tag: MessageTag) -> bytes:
        """Wait for a message, and return its content, which this object forgets.

        Raises: PeerLostError naming a sender that wrote no manifest in time; StorageError, WeightSyncError naming a
        file.
        """
        name = data_name(self._transfer, sender, tag)
        manifest = self._path(manifest_name(self._buffer, self._transfer, sender))
        content = self._threads.wait(self._files[sender], manifest).pop(name, None)
        if content is None:
            raise WeightSyncError(f"{manifest} does not list {name}")
        return self._threads.wait(content, self._path(name))

    def is_done(self) -> bool:
        """Return whether all messages are in memory. Raises: as `take`."""
        for sender, files in self._files.items():
            if not files.done():
                self._threads.require_progress(self._path(manifest_name(self._buffer, self._transfer, sender)))
                return False
        contents = {name: content for files in self._files.values() for name, content in files.result().items()}
        missing = next((name for name, content in contents.items() if not content.done()), None)
        if missing is not None:
            self._threads.require_progress(self._path(missing))
            return False
        for content in contents.values():
            content.result()
        return True

    def close(self) -> None:
        """End the fetch; messages that have not arrived raise a WeightSyncError."""
        self._closed.set()
        self._threads.close(wait=False)

    def _run(self) -> None:
        waiting = {manifest_name(self._buffer, self._transfer, sender): sender for sender in self._files}
        try:
            self._find(waiting)
        except BaseException as error:
            for sender in waiting.values():
                self._files[sender].set_exception(error)
            self._closed.set()
        self._threads.finish()

    def _find(self, waiting: dict[str, int]) -> None:
        """Begin to read the files of each manifest as soon as it exists, and remove it from `waiting`."""
        deadline, pause = time.monotonic() + self._timeout_seconds, FIRST_PAUSE_SECONDS
        while waiting:
            folder = manifest_folder(self._buffer)
            arrived = waiting.keys() & {f"{folder}/{name}" for name in self._folder.names(folder)}
            for manifest in sorted(arrived):
                self._files[waiting[manifest]].set_result(self._start(manifest))
                del waiting[manifest]
            if arrived:
                self._threads.note_progress()
                deadline, pause = time.monotonic() + self._timeout_seconds, FIRST_PAUSE_SECONDS
            elif time.monotonic() > deadline:
                missing, sender = next(iter(waiting.items()))
                raise PeerLostError(
                    f"{self._name(sender)} did not write {self._path(missing)} within {self._timeout_seconds:g} s"
                )
            elif self._closed.wait(pause):
                raise WeightSyncError("the connection was closed while weights were fetched")
            else:
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _start(self, manifest: str) -> Files:
        facts = decode(self._folder.read(manifest), self._path(manifest))
        return {name: self._threads.submit(partial(self._read, name, each)) for name, each in facts.items()}

    def _read(self, name: str, facts: FileFacts) -> bytes:
        content = self._folder.read(name)
        facts.check(content, self._path(name))
        return content

    def _path(self, name: str) -> str:
        return f"{self._folder.url}/{name}"
