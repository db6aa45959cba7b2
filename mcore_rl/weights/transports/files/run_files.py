"""Folder of a run's weight files: created when the run starts, one subfolder per connection, removed at its end."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rl.errors import McoreRLError, StorageError
from mcore_rl.remote.shared_folder import SharedFolder
from mcore_rl.weights.transports.files.channel import SHARED
from model_converters.durable_files import durable_write

KEY = "weights.directory"
RECORD = "weight_files.json"
"""File in run.dir with the URLs of the folders, so that the next start removes what a killed run has left."""

logger = logging.getLogger(__name__)


def shared_folder(url: str) -> SharedFolder:
    """Raises: ConfigError if the package of the URL's protocol is missing."""
    return SharedFolder(KEY, url)


@dataclass
class RunFiles:
    """Weight files of this start of the run. `url`: their folder."""

    url: str
    _connection: SharedFolder | None = field(default=None, init=False)

    def begin_connection(self, number: int) -> str:
        """Create the folder of a connection, and remove the earlier one, whose processes have disconnected.
        Returns its URL.

        Raises: StorageError.
        """
        if self._connection is not None:
            try:
                self._connection.remove_all()
            except (
                StorageError
            ) as error:  # a process that has not ended may read a file; the end of the run tries again
                logger.warning("weights of an earlier connection were not removed: %s", error)
        self._connection = shared_folder(f"{self.url}/{number}")
        self._connection.put(SHARED, memoryview(b""))
        return self._connection.url


@contextmanager
def run_files(directory: str, run_dir: Path) -> Iterator[RunFiles]:
    """Name a new folder below `directory` for the block, and remove it afterwards. Before, remove the folders of
    earlier starts of this run that were killed."""
    record = run_dir / RECORD
    last_start = _recorded(record)[-1:]
    _remove_recorded(record)
    # A new name per start: a process of the last start that still writes does not disturb this one. What it writes is
    # removed at the end.
    files = RunFiles(f"{directory.rstrip('/')}/mcore_rl-{secrets.token_hex(8)}")
    _write_record(record, [*dict.fromkeys([*_recorded(record), *last_start]), files.url])
    try:
        yield files
    finally:
        _remove_recorded(record)


def _remove_recorded(record: Path) -> None:
    """Remove the folders that the record names, and the record. Folders that cannot be removed stay in the record, so
    the next start tries again."""
    folders = _recorded(record)
    left = []
    for folder in folders:
        try:
            shared_folder(folder).remove_all()
        except McoreRLError as error:
            logger.warning("weight files of %s were not removed: %s", record.parent, error)
            left.append(folder)
    if left:
        _write_record(record, left)
    else:
        record.unlink(missing_ok=True)


def _recorded(record: Path) -> list[str]:
    """Return the URLs of the folders in the record; empty if there is none, or if it is damaged."""
    try:
        return [str(folder) for folder in json.loads(record.read_bytes())["folders"]]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("%s is damaged (%s): weight files of an earlier start may be left", record, error)
        return []


def _write_record(record: Path, folders: Sequence[str]) -> None:
    with durable_write(record) as file:
        file.write(json.dumps({"folders": folders}).encode())
