"""One checkpoint of several models: the files of each in a directory of its own, one account of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mcore_rl.ports import PendingSave
from mcore_rl.types import SavedFile, SavedState


@dataclass(frozen=True)
class JoinedSave:
    """A save that is done when all `parts` are; they are named by their directory, "" for the checkpoint's own."""

    parts: Mapping[str, PendingSave]

    def done(self) -> bool:
        return all(part.done() for part in self.parts.values())

    def result(self) -> SavedState:
        """Waits for all parts.

        Raises: what the first part that failed raised.
        """
        saved = {name: part.result() for name, part in self.parts.items()}
        files = [
            replace(file, name=f"{name}/{file.name}" if name else file.name)
            for name, state in saved.items()
            for file in state.files
        ]
        unnamed = saved.pop("")
        others = {name: state.description for name, state in saved.items()}
        return SavedState(tuple(files), unnamed.description | others)


def split_files(files: Sequence[SavedFile], directory: str) -> tuple[list[SavedFile], list[SavedFile]]:
    """(files outside `directory`, those in it, named from there)."""
    prefix = f"{directory}/"
    inside = [replace(file, name=file.name.removeprefix(prefix)) for file in files if file.name.startswith(prefix)]
    return [file for file in files if not file.name.startswith(prefix)], inside
