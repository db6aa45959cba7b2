"""What a grading process and its parent send each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """Samples that are graded together, a pickled list of them, and their keys. alone: the process may grade nothing
    else meanwhile."""

    keys: tuple[int, ...]
    pickled: bytes
    alone: bool = False

    @property
    def number(self) -> int:
        """By which an answer names it."""
        return self.keys[0]


@dataclass(frozen=True)
class Ready:
    """The grader is loaded; max_calls: tasks that are graded side by side."""

    max_calls: int


@dataclass(frozen=True)
class Refused:
    """The configuration names no grader that loads."""

    cause: str
