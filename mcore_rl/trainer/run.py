"""What a run consists of, as the loops see it, and the state that a checkpoint carries."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mcore_rl.config.schema import Config
from mcore_rl.errors import CheckpointError, DamagedCheckpointError, McoreRLError
from mcore_rl.ports import Actor, Collector, Critic, PendingSave, Publisher, Validator
from mcore_rl.trainer.checkpoints import ACCURACY, Checkpoints
from mcore_rl.trainer.joined_save import JoinedSave, split_files
from mcore_rl.trainer.reference import KL_CONTROLLER, Reference
from mcore_rl.trainer.validation import ValidationParts
from mcore_rl.types import Batch, Groups, Metric, SavedFile


@dataclass(frozen=True)
class RunState:
    """Where a run stands: finished steps, and the version of the weights that the engines hold."""

    step: int = 0
    version: int = 0

    def finished(self, step: int, version: int) -> RunState:
        return replace(self, step=step, version=version)


class Stateful(Protocol):
    """A part of the run whose position belongs to a checkpoint, such as a sampler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Underway(Protocol):
    """Groups that no step has trained."""

    def start_save(self, directory: str) -> PendingSave: ...

    def load(self, directory: str, files: Sequence[SavedFile]) -> None: ...


class Journal(Protocol):
    """Where figures go: one row per step; validation rows join the step they follow."""

    def record(self, metrics: dict[str, Metric]) -> None: ...

    def finish_step(self, step: int) -> None: ...

    def resume_after(self, step: int) -> None: ...

    def close(self) -> None: ...


class Stops(Protocol):
    """Requests to stop, which a step under way may still finish."""

    def begin(self, step: int) -> None: ...

    def requested(self) -> bool: ...


class StartCheck(Protocol):
    """A comparison of engines and trainer before the first step."""

    def check(self, version: int) -> None:
        """Raises: ConfigError."""


@dataclass
class Run:
    """A run of reinforcement learning. `batch_of` turns collected groups, the step and the version of the weights that
    the step starts from into a Batch (advantages, loss weights, updates); `describe` turns groups into metrics."""

    config: Config
    actor: Actor
    collector: Collector
    publisher: Publisher
    validator: Validator | None
    journal: Journal
    checkpoints: Checkpoints
    remove_unfinished: Callable[[], None]
    """Removes what a crash left of a step that had not ended."""
    positions: dict[str, Stateful]
    batch_of: Callable[[Groups, int, int], Batch]
    describe: Callable[[Groups], dict[str, Metric]]
    stops: Stops
    """Asked once at the end of each step; after a yes the run saves and stops."""
    estimates_tokens: bool = False
    """Whether advantages are made token by token, on the ranks; else batch_of has made them."""
    critic: Critic | None = None
    reference: Reference | None = None
    underway: Underway | None = None
    """Groups that were submitted ahead of the step that trains them, where there are such."""
    logp_gap: StartCheck | None = None
    """Called once, after engines have received the weights that the run starts from, also in a resumed run."""
    validation_parts: ValidationParts = field(default_factory=ValidationParts)
    """Prompts of validation with metrics of their own."""
    state: RunState = field(default_factory=RunState)


@dataclass
class SupervisedRun:
    """A run of supervised training (warm start): batches come from data, nothing is generated."""

    config: Config
    actor: Actor
    next_batch: Callable[[], Batch]
    journal: Journal
    checkpoints: Checkpoints
    remove_unfinished: Callable[[], None]
    positions: dict[str, Stateful]
    stops: Stops
    """As in Run."""
    state: RunState = field(default_factory=RunState)


def resume(run: Run | SupervisedRun) -> bool:
    """Continues from the newest checkpoint of the run directory, if there is one; what earlier processes recorded of
    later steps is set aside."""
    run.checkpoints.clean()
    run.remove_unfinished()
    resumed = load_latest(run)
    last_known = run.state.step if resumed else -1
    run.journal.resume_after(last_known)
    return resumed


def load_latest(run: Run | SupervisedRun) -> bool:
    """Restores the newest checkpoint, if there is one.

    Raises: CheckpointError when it does not fit this configuration; DamagedCheckpointError saying what to remove.
    """
    newest = run.checkpoints.latest()
    if newest is None:
        return False
    step, path = newest
    try:
        state, proof = run.checkpoints.read(path)
        _check_kind(run, state, path)
        _load_models(run, path, proof.files)
    except DamagedCheckpointError as error:
        raise run.checkpoints.with_remedy(error, step) from None
    for name, part in run.positions.items():
        part.load_state_dict(state["positions"][name])
    run.state = RunState(step=state["step"], version=state["version"])
    return True


CRITIC, GROUPS = "critic", "rollouts"
"""Directories of a checkpoint, beside the actor's files: of the critic's, and of groups that no step has trained."""


def _load_models(run: Run | SupervisedRun, path: Path, files: Sequence[SavedFile]) -> None:
    """Checks and loads the files of the actor, and those of the critic."""
    others, critics = split_files(files, CRITIC)
    actor_files, groups = split_files(others, GROUPS)
    underway = run.underway if isinstance(run, Run) else None
    if groups and underway is None:
        raise CheckpointError(
            f"{path} has groups that no step has trained, and this run is synchronous; set rollout.max_staleness as it "
            "was, or run.dir to a new directory"
        )
    critic = run.critic if isinstance(run, Run) else None
    if (critic is None) != (not critics):
        there, wanted = ("a", "none") if critics else ("no", "one")
        raise CheckpointError(f"{path} has {there} critic, and this run {wanted}; set run.dir to a new directory")
    run.actor.load(str(path), actor_files)
    if critic is not None:
        critic.load(str(path / CRITIC), critics)
    if groups and underway is not None:
        underway.load(str(path / GROUPS), groups)


def _check_kind(run: Run | SupervisedRun, state: dict[str, Any], path: Path) -> None:
    saved, wanted = set(state["positions"]), set(run.positions)
    if saved ^ wanted == {KL_CONTROLLER}:
        there, here = ("an", "none") if KL_CONTROLLER in saved else ("no", "one")
        raise CheckpointError(
            f"{path} has {there} adaptive coefficient of the KL, and this run {here}: set algorithm.kl.controller as "
            "it was, or run.dir to a new directory"
        )
    if saved != wanted:
        raise CheckpointError(f"{path} belongs to another kind of run; set run.dir to a new directory")


def steps_left(run: Run | SupervisedRun) -> Iterator[int]:
    """The steps up to trainer.steps that have not been done; each is under way until the next is asked for."""
    for step in range(run.state.step + 1, run.config.trainer.steps + 1):
        run.stops.begin(step)
        yield step


def save(run: Run | SupervisedRun, accuracy: float | None = None) -> None:
    """A checkpoint of everything that the next step depends on; with checkpoint.async_save it is only begun. Nothing
    happens when there is one of this step. May be called between any two steps. By `accuracy`, that of a validation
    just now, checkpoint.keep_best finds the best."""
    state = {
        "step": run.state.step,
        "version": run.state.version,
        ACCURACY: accuracy,
        "positions": {name: part.state_dict() for name, part in run.positions.items()},
    }
    in_background = run.config.checkpoint.async_save
    start = functools.partial(_start_save, run, snapshot=in_background)
    run.checkpoints.save(run.state.step, state, start, wait=not in_background)


def _start_save(run: Run | SupervisedRun, directory: str, *, snapshot: bool) -> PendingSave:
    saves: dict[str, PendingSave] = {}
    if isinstance(run, Run) and run.underway is not None:
        saves[GROUPS] = run.underway.start_save(_made(directory, GROUPS))
    saves[""] = run.actor.start_save(directory, snapshot=snapshot)
    if isinstance(run, Run) and run.critic is not None:
        saves[CRITIC] = run.critic.start_save(_made(directory, CRITIC), snapshot=snapshot)
    return saves[""] if len(saves) == 1 else JoinedSave(saves)


def _made(directory: str, name: str) -> str:
    path = Path(directory, name)
    path.mkdir()
    return str(path)


@contextlib.contextmanager
def saves_settled(run: Run | SupervisedRun) -> Iterator[None]:
    """A checkpoint that is being written when the block ends is finished before the run does, also when it ends with an
    error of its own. Ctrl-C does not wait: the checkpoint before stays the newest."""
    try:
        yield
    except McoreRLError:
        with contextlib.suppress(McoreRLError):
            run.checkpoints.settle()
        raise
    run.checkpoints.settle()
