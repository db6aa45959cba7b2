"""Checkpoints of a run: written under a temporary name, renamed when complete, the last few kept."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.errors import CheckpointError

STATE_FILE = "state.json"
_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Checkpoints:
    """The `checkpoints/` directory of a run. A directory named step_<n> is complete by construction."""

    directory: Path
    keep_last: int

    def latest(self) -> tuple[int, Path] | None:
        """The newest complete checkpoint, or None."""
        found = self._complete()
        return found[-1] if found else None

    def save(self, step: int, state: dict[str, Any], write: Callable[[str], None]) -> Path:
        """Calls `write(temporary directory)`, adds `state` as JSON, makes it durable, renames it, drops old ones."""
        self.clean()
        final, temporary = (
            self.directory / f"step_{step}",
            self.directory / f".step_{step}.partial",
        )
        temporary.mkdir(parents=True)
        write(str(temporary))
        (temporary / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        _make_durable(temporary)
        if final.exists():
            self._discard(final)
        os.replace(temporary, final)
        _sync(self.directory)
        for _, old in self._complete()[: -self.keep_last]:
            self._discard(old)
        return final

    @staticmethod
    def read_state(path: Path) -> dict[str, Any]:
        """The state saved with a checkpoint.

        Raises: CheckpointError.
        """
        try:
            return json.loads((path / STATE_FILE).read_text(encoding="utf-8"))  # type: ignore[no-any-return]
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path / STATE_FILE} cannot be read: {error}; remove {path} to use an older one"
            ) from None

    def clean(self) -> None:
        """Removes what a crash left half-written or half-removed."""
        for path in self.directory.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def _complete(self) -> list[tuple[int, Path]]:
        if not self.directory.is_dir():
            return []
        found = [(int(match[1]), path) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        return sorted(found)

    def _discard(self, path: Path) -> None:
        # Renamed first, so that a crash while removing never leaves a step_<n> that lacks files.
        doomed = path.with_name(f".{path.name}.removed")
        os.replace(path, doomed)
        shutil.rmtree(doomed)


def _make_durable(directory: Path) -> None:
    for root, _, files in os.walk(directory):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
