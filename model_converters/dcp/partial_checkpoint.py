"""A checkpoint that is still being written: a directory beside the target that a killed conversion leaves for the
next one to finish."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_converters.errors import ConversionError, listing
from model_converters.hf.side_files import sync

Span = tuple[int, int]
"""Where an entry of a file lies. Units: bytes, from the start of the file and long."""

_IDENTITY = "conversion.json"
_FINISHED = "finished.jsonl"


class PartialCheckpoint:
    """`.<name>.partial` beside the target, with what it is a conversion of and which of its files are complete.

    A file counts when it was noted, which happens after it is durable, and has the noted length. Notes are JSON:
    nothing found in the directory is ever unpickled.
    """

    def __init__(self, target: Path | str) -> None:
        self.target = Path(target).absolute()
        self.directory = self.target.with_name(f".{self.target.name}.partial")
        self._lock: int | None = None

    def open(self, identity: Mapping[str, Any]) -> dict[str, list[Span]]:
        """Makes the directory, or enters one that a conversion of the same `identity` left; returns its finished files.

        Raises: ConversionError when the target exists, another conversion holds the directory or left it, or it
        cannot be made.
        """
        if self.target.exists() and (not self.target.is_dir() or any(self.target.iterdir())):
            raise ConversionError(f"{self.target} exists already; remove it or choose another directory")
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            fresh = not self.directory.exists()
            self.directory.mkdir(exist_ok=True)
            self._acquire()
        except OSError as error:
            raise ConversionError(f"{self.target} cannot be written: {error}") from error
        recorded = None if fresh else self._read_identity()
        if recorded is None:
            self._start(identity)
            return {}
        # Through JSON, as the recorded one: tuples are lists there.
        differing = _differences(recorded, json.loads(json.dumps(identity)))
        if differing:
            self.close()
            raise ConversionError(
                f"{self.directory} holds an unfinished conversion with another {listing(differing)}; "
                "repeat that one to finish it, or remove the directory"
            )
        return self._read_finished()

    def note(self, name: str, spans: Sequence[Span]) -> None:
        """Records that a file is complete and durable."""
        with (self.directory / _FINISHED).open("a", encoding="utf-8") as opened:
            opened.write(json.dumps({"file": name, "spans": spans}) + "\n")
            opened.flush()
            os.fsync(opened.fileno())

    def publish(self) -> None:
        """Renames the directory to the target, without the notes."""
        for name in (_FINISHED, _IDENTITY):
            (self.directory / name).unlink(missing_ok=True)
        for file in self.directory.iterdir():
            if file.suffix != ".distcp":  # those were made durable one by one
                sync(file)
        sync(self.directory)
        os.rename(self.directory, self.target)
        sync(self.target.parent)
        self.close()

    def discard(self) -> None:
        """Removes the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Lets another process have the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _acquire(self) -> None:
        self._lock = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConversionError(f"another process is writing {self.target} at this moment") from None

    def _start(self, identity: Mapping[str, Any]) -> None:
        """A directory without a readable identity holds nothing that could be finished."""
        for left in self.directory.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        temporary = self.directory / f"{_IDENTITY}.new"
        temporary.write_text(json.dumps(identity, indent=1), encoding="utf-8")
        sync(temporary)
        os.replace(temporary, self.directory / _IDENTITY)
        sync(self.directory)

    def _read_identity(self) -> dict[str, Any] | None:
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
                continue  # cut off by the kill, or its file is gone: the file is written again
            if spans and num_bytes == sum(spans[-1]):
                spans_by_file[name] = spans
        return spans_by_file


def _differences(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [key for key in {**wanted, **recorded} if recorded.get(key) != wanted.get(key)]
