"""Ids of a run in its trackers: run.dir/trackers/ids.json. A resumed run continues under the same ids."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

from mcore_rl.errors import DataError
from model_converters.durable_files import durable_write

FILE_NAME = "ids.json"


class RunIds:
    """Ids by tracker, shared by the threads of all trackers. `directory`: run.dir/trackers, created when needed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()

    def get(self, tracker: str) -> str | None:
        """Return the id of an earlier start of this run, if any.

        Raises: DataError for an invalid file.
        """
        path = self.directory / FILE_NAME
        try:
            ids = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(f"{path} is not valid JSON: {error}; remove it to begin new runs in all trackers") from None
        found = ids.get(tracker) if isinstance(ids, dict) else None
        return found if isinstance(found, str) else None

    def get_or_make(self, tracker: str, make: Callable[[], str]) -> str:
        """Return the id of an earlier start, or store and return a new one.

        Raises: DataError for an invalid file; OSError if it cannot be written.
        """
        with self._lock:
            known = self.get(tracker)
            if known is None:
                known = make()
                self._store(tracker, known)
            return known

    def _store(self, tracker: str, run_id: str) -> None:
        path = self.directory / FILE_NAME
        ids = json.loads(path.read_bytes()) if path.exists() else {}
        self.directory.mkdir(mode=0o700, exist_ok=True)
        with durable_write(path) as file:
            file.write((json.dumps({**ids, tracker: run_id}, indent=1) + "\n").encode())
