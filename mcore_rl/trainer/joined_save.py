"""Checkpoints of several models: each model's files are in their own directory, one proof covers all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mcore_rl.ports import PendingSave
from mcore_rl.types import SavedFile, SavedState


@dataclass(frozen=True)
class JoinedSave:
    """Save that is complete when all `parts` are complete. Keys of `parts` are directories of the checkpoint, "" for
    its top level."""

    parts: Mapping[str, PendingSave]

    def done(self) -> bool:
        return all(part.done() for part in self.parts.values())

    def result(self) -> SavedState:
        """Wait for all parts.

        Raises: the error of the first part that failed.
        """
        saved = {name: part.result() for name, part in self.parts.items()}
        files = [
            replace(file, name=f"{name}/{file.name}" if name else file.name)
            for name, state in saved.items()
            for file in state.files
        ]
        # The description of the checkpoint's own model is at the top level, the others below their directory's name.
        unnamed = saved.pop("")
        others = {name: state.description for name, state in saved.items()}
        return SavedState(tuple(files), unnamed.description | others)


def split_files(files: Sequence[SavedFile], directory: str) -> tuple[list[SavedFile], list[SavedFile]]:
    """Split into (files outside `directory`, files in it with names relative to it)."""
    prefix = f"{directory}/"
    inside = [replace(file, name=file.name.removeprefix(prefix)) for file in files if file.name.startswith(prefix)]
    return [file for file in files if not file.name.startswith(prefix)], inside
