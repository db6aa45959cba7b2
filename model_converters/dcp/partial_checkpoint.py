"""Directory of a checkpoint that is being written. A killed conversion leaves it behind; the next call resumes it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from model_converters.durable_files import sync, write_json
from model_converters.errors import ConversionError, listing

Span = tuple[int, int]
"""(offset, length) of an entry in a file. Units: bytes."""

_IDENTITY = "conversion.json"
_FINISHED = "finished.jsonl"


class PartialCheckpoint:
    """Directory `.<name>.partial` next to the target, with a record of the conversion and of its finished files.

    A file counts as finished if it was recorded, which happens after its fsync, and has the recorded length. Records
    are JSON: nothing in the directory is unpickled.
    """

    def __init__(self, target: Path | str) -> None:
        self.target = Path(target).absolute()
        self.directory = self.target.with_name(f".{self.target.name}.partial")
        self._lock: int | None = None

    def open(self, identity: Mapping[str, object]) -> dict[str, list[Span]]:
        """Create the directory, or resume one with the same `identity`. Returns the spans of its finished files.

        Raises: ConversionError if the target exists, another process writes it, the directory belongs to another
        conversion, or it cannot be created.
        """
        if self.target.exists() and (not self.target.is_dir() or any(self.target.iterdir())):
            raise ConversionError(f"{self.target} exists already; remove it or choose another directory")
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.directory.mkdir(exist_ok=True)
            self._acquire()
        except OSError as error:
            raise ConversionError(f"{self.target} cannot be written: {error}") from error
        recorded = self._read_identity()
        if recorded is None:
            self._start(identity)
            return {}
        # Convert to JSON and back: the recorded identity has lists instead of tuples.
        wanted = json.loads(json.dumps(identity))
        differing = [key for key in {**wanted, **recorded} if recorded.get(key) != wanted.get(key)]
        if differing:
            self.close()
            raise ConversionError(
                f"{self.directory} holds an unfinished conversion with another {listing(differing)}; "
                "repeat that one to finish it, or remove the directory"
            )
        return self._read_finished()

    def note(self, name: str, spans: Sequence[Span]) -> None:
        """Record that a file is complete. Call it after the file's fsync."""
        with (self.directory / _FINISHED).open("a", encoding="utf-8") as opened:
            opened.write(json.dumps({"file": name, "spans": spans}) + "\n")
            opened.flush()
            os.fsync(opened.fileno())

    def publish(self) -> None:
        """Remove the records and rename the directory to the target."""
        for name in (_FINISHED, _IDENTITY):
            (self.directory / name).unlink(missing_ok=True)
        for file in self.directory.iterdir():
            if file.suffix != ".distcp":  # write_file has synced these
                sync(file)
        sync(self.directory)
        os.rename(self.directory, self.target)
        sync(self.target.parent)
        self.close()

    def discard(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _acquire(self) -> None:
        self._lock = os.open(self.directory, os.O_RDONLY)
        try:
            # The kernel releases the lock when the process ends, also after SIGKILL.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConversionError(f"another process is writing {self.target}") from None

    def _start(self, identity: Mapping[str, object]) -> None:
        """Empty the directory and record the identity. Files without a readable identity cannot be resumed."""
        for stale in self.directory.iterdir():
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        write_json(self.directory / _IDENTITY, identity)

    def _read_identity(self) -> dict[str, object] | None:
        try:
            recorded = json.loads((self.directory / _IDENTITY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return recorded if isinstance(recorded, dict) else None

    def _read_finished(self) -> dict[str, list[Span]]:
        spans_by_file: dict[str, list[Span]] = {}
        notes = self.directory / _FINISHED
        for line in notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []:
            try:
                note = json.loads(line)
                name, spans = note["file"], [(int(start), int(length)) for start, length in note["spans"]]
                num_bytes = (self.directory / Path(name).name).stat().st_size
            except (OSError, ValueError, KeyError, TypeError):
                continue  # the record is truncated or its file is missing: write the file again
            # The last entry ends at the end of the file.
            if spans and num_bytes == sum(spans[-1]):
                spans_by_file[name] = spans
        return spans_by_file
