"""Messages between a grading process and its parent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GradingTask:
    """Samples that the grader receives in one call.

    keys: one per sample.
    pickled: the list of samples.
    alone: the process may not grade anything else at the same time.
    """

    keys: tuple[int, ...]
    pickled: bytes
    alone: bool = False

    @property
    def number(self) -> int:
        """Identifier of the task in answers."""
        return self.keys[0]


@dataclass(frozen=True)
class Ready:
    """The grader is loaded. max_calls: number of tasks that the process grades concurrently."""

    max_calls: int


@dataclass(frozen=True)
class Refused:
    """The configured grader does not load."""

    cause: str
