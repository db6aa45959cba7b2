"""Bytes of the checkpoint that is being written, measured in its directory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.observe.screen.board import Work

SECONDS_BETWEEN_LOOKS = 1.0
PART_OF_TIME = 20
"""A look waits this many times as long as the last one took: a shared file system may need seconds for many files."""
_PARTIAL = re.compile(r"\.step_(\d+)\.partial")
_COMPLETE = re.compile(r"step_(\d+)")


class SavedBytes:
    """Looks at the directory with the checkpoints of a run. The size of the newest complete checkpoint is the expected
    size; without one, there is no fraction."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._work: Work | None = None
        self._next_look = 0.0

    def current(self) -> Work | None:
        """Return the save in progress, which may run in the background; None if there is none."""
        now = time.monotonic()
        if now >= self._next_look:
            self._work = self._look(now)
            self._next_look = now + max(SECONDS_BETWEEN_LOOKS, PART_OF_TIME * (time.monotonic() - now))
        return self._work

    def _look(self, now: float) -> Work | None:
        names = _names(self._directory)
        partial = next((match for name in names if (match := _PARTIAL.fullmatch(name))), None)
        if partial is None:
            return None
        name = f"checkpoint of step {partial[1]}"
        if self._work is None or self._work.name != name:
            complete = max((int(match[1]) for each in names if (match := _COMPLETE.fullmatch(each))), default=None)
            total = None if complete is None else float(_num_bytes(self._directory / f"step_{complete}"))
            self._work = Work(name, now, total=total, unit="bytes")
        done = float(_num_bytes(self._directory / partial[0]))
        total = self._work.total
        # Groups in flight have different sizes at each step.
        return Work(name, self._work.since, done, None if total is None else max(total, done), "bytes")


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    # Created by the first save.
    except OSError:
        return []


def _num_bytes(directory: Path) -> int:
    return sum(_sizes(directory))


def _sizes(directory: Path) -> Iterator[int]:
    """Yield the sizes of all files below a directory. It may be renamed or removed meanwhile."""
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(Path(entry.path))
                else:
                    yield entry.stat(follow_symlinks=False).st_size
    except OSError:
        return
