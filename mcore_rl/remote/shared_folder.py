"""Files that processes of several hosts exchange, in a directory or below a URL."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath

from mcore_rl.errors import ConfigError, McoreRLError, StorageError
from mcore_rl.remote.file_systems import file_system, is_local, named_errors, shown


class SharedFolder:
    """Folder at `url`. `key`: configuration key that names it, for errors. Threads may share an object.

    Names of files are relative to the folder. A file appears whole: a local file is renamed when it is complete, and an
    object store shows an object after its last byte. Only this user may read local files.
    """

    def __init__(self, key: str, url: str) -> None:
        """Raises: ConfigError if the package of the URL's protocol is missing."""
        self.key, self.url = key, url
        with named_errors(key, url):
            self._system, self._root = file_system(key, url)
        self._parents: set[str] = set()
        """Folders that exist."""

    def put(self, name: str, data: memoryview) -> None:
        """Write a file, and replace one of the same name. Raises: StorageError naming it."""
        path = self._path(name)
        with self._named(name):
            parent = path.rpartition("/")[0]
            if parent not in self._parents:
                self._system.makedirs(parent, exist_ok=True)
                self._parents.add(parent)
            if not is_local(self._system):
                self._system.pipe_file(path, bytes(data))
                return
            # A reader never opens this name.
            partial = f"{parent}/.{PurePosixPath(path).name}.part"
            try:
                with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                    file.write(data)
                os.replace(partial, path)
            except OSError:
                with suppress(OSError):
                    os.unlink(partial)  # on a full disk this frees space
                raise

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises: StorageError naming it."""
        with self._named(name):
            content: bytes = self._system.cat_file(self._path(name))
            return content

    def names(self, name: str) -> set[str]:
        """Return the names of the files directly in the folder `name`, relative to it; empty if it does not exist.

        Raises: StorageError.
        """
        with self._named(name):
            # A listing from the server: on a network file system it also ends the caching of names that did not exist.
            self._system.invalidate_cache()
            try:
                found = self._system.ls(self._path(name), detail=False)
            except FileNotFoundError:
                return set()
            return {PurePosixPath(path).name for path in found}

    def remove(self, names: Collection[str]) -> None:
        """Remove files; one that does not exist any more is skipped. Raises: StorageError naming the first one."""
        if not names:
            return
        with self._named(next(iter(names))):
            paths = [self._path(name) for name in names]
            if not is_local(self._system):
                self._system.rm(paths)
                return
            for path in paths:
                with suppress(FileNotFoundError):  # a job that removes old files may be faster
                    os.unlink(path)

    def remove_all(self) -> None:
        """Remove the folder with everything in it, if it exists. Raises: StorageError."""
        self._parents.clear()
        with self._named(""):
            self._system.invalidate_cache()
            if self._system.exists(self._root):
                self._system.rm(self._root, recursive=True)

    def check_writable(self) -> None:
        """Write, read and remove a file. A folder that does not exist is created.

        Raises: ConfigError naming the key.
        """
        name, content = f"mcore_rl_probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
        try:
            self.put(name, memoryview(content))
            if self.read(name) != content:
                raise StorageError(f"{self.key}={self.url}: a file that was written there has another content")
            self.remove([name])
        except StorageError as error:
            raise ConfigError(str(error)) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Convert errors of the block, except this project's, to a StorageError that names the file."""
        try:
            yield
        except McoreRLError:
            raise
        # The packages of protocols raise errors of their own, for example botocore's if there are no credentials.
        except Exception as error:
            place = f"{self.url.rstrip('/')}/{name}" if name else self.url
            raise StorageError(
                f"{self.key}: {place}: {shown(error)}; check that every host can read and write "
                f"there and that space is left, or set {self.key} to another directory"
            ) from error
