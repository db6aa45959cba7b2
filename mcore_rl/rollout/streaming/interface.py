"""What a streaming collector knows of engines, and what it keeps of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mcore_rl.types import BuffersRef, Mean, RolloutResult, RolloutScalars, RolloutTask, SavedFile

TRAJECTORIES, JOURNAL = ".npz", ".journal"
"""How files of a checkpoint end."""


class TaskStream(Protocol):
    """Engines that have work all the time."""

    @property
    def num_engines(self) -> int: ...

    @property
    def running_requests(self) -> int: ...

    @property
    def slots(self) -> int:
        """Requests that all engines have under way together."""

    def attend(self, heard: Callable[[], None]) -> None:
        """`heard` is called when tasks have ended, whatever the driver waits for; it must not wait itself."""

    def begin(self, task: RolloutTask, results: dict[int, RolloutResult]) -> int:
        """A ticket, under which what comes of the task is put into `results` when it has ended."""

    def together(self) -> AbstractContextManager[None]:
        """Within it tasks do not begin one by one, but all at its end, by fewer calls."""

    def wait(self) -> None:
        """Until something has ended, or a while has passed."""

    def rest(self) -> None:
        """Until all that is under way waits for other weights, or has ended."""

    def idle_fraction(self) -> Mean:
        """Of the time of all engines since the last call, what they had nothing to do in."""

    def save(self, directory: Path, chunks: Sequence[BuffersRef], tickets: Sequence[int]) -> SavedTasks:
        """Writes trajectories, and what was drawn so far of tasks under way, into the directory. Nothing else may be in
        progress: what lost engines had is made again."""

    def restore(self, path: Path, made: Sequence[tuple[RolloutTask, RolloutScalars]]) -> list[BuffersRef]:
        """The trajectories that a file holds, one after the other, of these tasks; an engine keeps them."""


Score = Callable[[Sequence[RolloutTask], Sequence[RolloutResult]], list[RolloutResult]]
"""The results with the scores of reward models; it may wait."""


@dataclass(frozen=True)
class SavedTasks:
    """Where the trajectories of each chunk are, (file, number in it), and all files."""

    places: list[tuple[str, int]]
    files: list[SavedFile]


@dataclass
class Group:
    """Of one prompt; `version` of the weights when it was submitted."""

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
