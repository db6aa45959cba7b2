"""Files at URLs such as s3://bucket/file."""

from __future__ import annotations

import glob
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from mcore_rl.config.reading.remote_names import is_url
from mcore_rl.errors import DataError, StorageError
from mcore_rl.remote.file_systems import PARALLEL_FILES, file_system, named_errors
from mcore_rl.remote.hub import DATA_KINDS

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MARKERS = ("config.json", "adapter_config.json")
"""Files of an export that are uploaded last: their presence means that it is complete."""
T = TypeVar("T")


def fetch(key: str, url: str, folder: Path) -> str:
    """Download a file, the files of a glob, or the data files directly in a directory, into a folder below `folder`.
    Files that were downloaded before and have not changed since are not downloaded again.

    Returns the path of the file or directory, or a glob of the files.
    Raises: ConfigError naming `key` if the URL cannot be read; DataError if there is no file.
    """
    with named_errors(key, url):
        system, path = file_system(key, url)
        root, pattern, files = _found(system, path)
        if not files:
            raise DataError(f"{key}: there is no file {url}; set {key} to a {', '.join(DATA_KINDS)} file, or to a glob")
        local = {file: _relative(key, file, root, is_web=_is_web(system)) for file in files}
        # These facts have a file's size, and its time or checksum, so that they change with the content.
        versions = "\n".join(repr(sorted(system.info(file).items())) for file in files)
        target = folder / hashlib.sha256(f"{url}\n{versions}".encode()).hexdigest()[:16]
        # A web server may report neither.
        if _is_web(system):
            shutil.rmtree(target, ignore_errors=True)
        if not target.is_dir():
            _download(system, local, target)
    if pattern:
        return f"{glob.escape(str(target))}/{pattern}"
    return str(target if root == path else target / local[files[0]])


def has_export(key: str, target: str) -> bool:
    """Return True if the directory exists, or a complete export is at the URL. Raises: ConfigError naming `key` if it
    cannot be read."""
    if not is_url(target):
        return Path(target).exists()
    with named_errors(key, target):
        system, path = file_system(key, target)
        return any(system.exists(f"{path}/{marker}") for marker in MARKERS)


@contextmanager
def uploaded(key: str, target: str, staging: Path) -> Iterator[str]:
    """Yield the directory to write an export to, `staging`, and upload it to the URL `target` at the end of the block,
    the marker last. `staging` is removed after a complete upload, and replaced if it exists.

    Raises: StorageError naming `key`, and `staging`, if the files cannot be uploaded.
    """
    shutil.rmtree(staging, ignore_errors=True)
    staging.parent.mkdir(exist_ok=True)
    yield str(staging)
    with named_errors(key, target, StorageError, f"; the files are in {staging}"):
        system, path = file_system(key, target)
        put_folder(system, staging, path, MARKERS)
    shutil.rmtree(staging)


def put_folder(system: AbstractFileSystem, folder: Path, target: str, markers: Sequence[str]) -> None:
    """Copy the files of a folder to `target`, the files with the names `markers` last, and check their sizes.

    Raises: errors of the file system, OSError for a file that has another size there.
    """

    def put(file: Path) -> None:
        place = f"{target}/{file.relative_to(folder).as_posix()}"
        system.makedirs(place.rpartition("/")[0], exist_ok=True)
        system.put_file(str(file), place)
        if system.size(place) != file.stat().st_size:
            raise OSError(f"{place} has {system.size(place)} bytes instead of {file.stat().st_size}")

    files = [file for file in folder.rglob("*") if file.is_file()]
    for chosen in (False, True):
        in_parallel(put, [file for file in files if (file.name in markers) == chosen])


def in_parallel(copy: Callable[[T], None], files: Sequence[T]) -> None:
    """Copy files at the same time, since one connection rarely fills a network. Raises: the error of the first file
    that fails."""
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        for _ in pool.map(copy, files):
            pass


def _found(system: AbstractFileSystem, path: str) -> tuple[str, str, list[str]]:
    """Return the directory that contains all files, the glob below it (empty if there is none), and the files."""
    # `?` begins the query of a web address.
    if _is_web(system):
        return path.rpartition("/")[0], "", [path] if system.exists(path) else []
    if glob.has_magic(path):
        parts = path.split("/")
        first = next(place for place, part in enumerate(parts) if glob.has_magic(part))
        found = sorted(file for file in system.glob(path) if system.isfile(file))
        return "/".join(parts[:first]), "/".join(parts[first:]), found
    if system.isdir(path):
        listed = sorted(file for file in system.ls(path, detail=False) if file.endswith(DATA_KINDS))
        return path, "", [file for file in listed if system.isfile(file)]
    return path.rpartition("/")[0], "", [path] if system.exists(path) else []


def _is_web(system: AbstractFileSystem) -> bool:
    return "http" in system.protocol


def _relative(key: str, file: str, root: str, *, is_web: bool) -> str:
    """Return the path of a file below `root`. Raises: DataError if its name leaves this directory."""
    relative = PurePosixPath(PurePosixPath(urlsplit(file).path).name if is_web else file[len(root) :].lstrip("/"))
    if ".." in relative.parts or not relative.parts:
        raise DataError(f"{key}: the file {file} has no name, or '..' in it; rename it")
    return str(relative)


def _download(system: AbstractFileSystem, local: dict[str, str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Under another name first, so that a download that was cut is not used.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as scratch:
        for file, relative in local.items():
            path = Path(scratch) / "files" / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(file, str(path))
        try:
            (Path(scratch) / "files").rename(target)
        except OSError:
            # Another process may have downloaded the same files meanwhile.
            if not target.is_dir():
                raise
