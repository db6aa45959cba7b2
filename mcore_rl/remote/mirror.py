"""Copies of folders at a URL or in another directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mcore_rl.errors import DataError, StorageError
from mcore_rl.remote.file_systems import file_system, named_errors
from mcore_rl.remote.storage import in_parallel, put_folder


@dataclass(frozen=True)
class Mirror:
    """Copies of folders. A copy is complete when it has the marker, which is written last and removed first.

    key: configuration key of the address, for errors. url: URL or directory that contains the copies. marker: name of a
    file that every folder has.
    """

    key: str
    url: str
    marker: str

    def complete(self) -> list[str]:
        """Return the names of the complete copies. Raises: ConfigError if the address cannot be read."""
        with named_errors(self.key, self.url):
            system, root = file_system(self.key, self.url)
            system.invalidate_cache()
            if not system.exists(root):
                return []
            names = sorted(PurePosixPath(path.rstrip("/")).name for path in system.ls(root, detail=False))
            return [name for name in names if system.exists(f"{root}/{name}/{self.marker}")]

    def has(self, folder: Path) -> bool:
        """Return whether the copy of this name is complete and has the same marker. Raises: StorageError."""
        with named_errors(self.key, self.url, StorageError):
            system, root = file_system(self.key, self.url)
            system.invalidate_cache()
            marker = f"{root}/{folder.name}/{self.marker}"
            return bool(system.exists(marker)) and system.cat_file(marker) == (folder / self.marker).read_bytes()

    def upload(self, folder: Path) -> None:
        """Copy a folder; replaces a copy of the same name.

        Raises: StorageError if a file cannot be read or written, or has another size there.
        """
        self.remove(folder.name)
        with named_errors(self.key, self.url, StorageError):
            system, root = file_system(self.key, self.url)
            put_folder(system, folder, f"{root}/{folder.name}", [self.marker])

    def remove(self, name: str) -> None:
        """Remove a copy, complete or not. Raises: StorageError."""
        with named_errors(self.key, self.url, StorageError):
            system, root = file_system(self.key, self.url)
            if system.exists(marker := f"{root}/{name}/{self.marker}"):
                system.rm_file(marker)
            if system.exists(folder := f"{root}/{name}"):
                system.rm(folder, recursive=True)

    def fetch(self, name: str, folder: Path) -> None:
        """Copy a complete copy into a new folder, the marker last.

        Raises: ConfigError if a file cannot be read; DataError for a file name that leaves the folder.
        """
        with named_errors(self.key, self.url):
            system, root = file_system(self.key, self.url)
            start = f"{root}/{name}/"
            files = [_below(self.key, path, start) for path in system.find(start)]

            def copy(file: str) -> None:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                system.get_file(start + file, str(folder / file))

            in_parallel(copy, [file for file in files if file != self.marker])
            copy(self.marker)


def _below(key: str, path: str, start: str) -> str:
    """Return the path of a file below `start`. Raises: DataError if its name leaves this folder."""
    name = path.removeprefix(start)
    if name == path or ".." in PurePosixPath(name).parts or name.startswith("/"):
        raise DataError(f"{key}: the file {path} is outside {start}; remove it")
    return name
