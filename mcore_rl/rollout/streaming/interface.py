"""Interface between the streaming collector and the engines, and the state of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mcore_rl.types import BuffersRef, Mean, RolloutResult, RolloutScalars, RolloutTask, SavedFile

TRAJECTORIES, JOURNAL = ".npz", ".journal"
"""Suffixes of checkpoint files."""


class TaskStream(Protocol):
    """Engines that run tasks continuously."""

    @property
    def num_engines(self) -> int: ...

    @property
    def running_requests(self) -> int: ...

    @property
    def slots(self) -> int:
        """Number of requests that all engines run concurrently."""

    def attend(self, heard: Callable[[], None]) -> None:
        """Register a callback for finished tasks, also while the driver waits for something else; it must not block."""

    def begin(self, task: RolloutTask, results: dict[int, RolloutResult]) -> int:
        """Start a task and return its ticket; when it has finished, its result is stored in `results` under this
        ticket."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which started tasks are collected and sent at its end, with fewer calls."""

    def wait(self) -> None:
        """Wait until a task has finished or some time has passed."""

    def rest(self) -> None:
        """Wait until all running tasks have finished or need other weights."""

    def idle_fraction(self) -> Mean:
        """Return the fraction of the engines' time since the last call in which they were idle."""

    def save(self, directory: Path, chunks: Sequence[BuffersRef], tickets: Sequence[int]) -> SavedTasks:
        """Write trajectories, and sampled tokens of running tasks, into the directory. No other call may be in
        progress. Tokens that lost engines had sampled are not saved; they are sampled again."""

    def restore(self, path: Path, made: Sequence[tuple[RolloutTask, RolloutScalars]]) -> list[BuffersRef]:
        """Load the trajectories of these tasks, in order, from a file; an engine holds them."""


ScoreTasks = Callable[[Sequence[RolloutTask], Sequence[RolloutResult]], list[RolloutResult]]
"""Function that adds the scores of reward models to results; it may block."""


@dataclass(frozen=True)
class SavedTasks:
    """(file, index in it) of the trajectories of each chunk, and all files."""

    places: list[tuple[str, int]]
    files: list[SavedFile]


@dataclass
class Group:
    """Responses to one prompt; `version` is the weight version at submission."""

    task: RolloutTask
    version: int
    result: RolloutResult | None = None
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = int(self.task.group_ids[0])

    @property
    def scalars(self) -> RolloutScalars:
        assert self.result is not None
        return self.result[1]
