"""Parts of a run as used by the loops, and the state that a checkpoint stores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from mcore_rl.algorithms.entropy_controller import EntropyController
from mcore_rl.config.objectives import REWARD_MODEL
from mcore_rl.config.schema import Config
from mcore_rl.errors import CheckpointError, DamagedCheckpointError, McoreRLError
from mcore_rl.ports import Actor, Collector, Critic, PendingSave, Publisher, Teacher, Validator
from mcore_rl.trainer.checkpoints import Checkpoints, CheckpointState, JoinedSave, split_files
from mcore_rl.trainer.logp_gap import LogpGapCheck
from mcore_rl.trainer.reference import CONTROLLERS, Reference
from mcore_rl.trainer.validation import ValidationParts
from mcore_rl.types import Batch, Groups, Metric, SavedFile
from mcore_rl.types.json import JsonObject


@dataclass(frozen=True)
class RunState:
    """Progress of a run: the number of finished steps and the weight version of the engines."""

    step: int = 0
    version: int = 0

    def finished(self, step: int, version: int) -> RunState:
        return replace(self, step=step, version=version)


class Stateful(Protocol):
    """Part of the run whose position is stored in checkpoints, such as a sampler."""

    def state_dict(self) -> JsonObject: ...

    def load_state_dict(self, state: JsonObject) -> None: ...


class InFlightGroups(Protocol):
    """Submitted groups that no step has trained yet."""

    def start_save(self, directory: str) -> PendingSave: ...

    def load(self, directory: str, files: Sequence[SavedFile]) -> None: ...


class MetricsJournal(Protocol):
    """Record of metrics: one row per step; metrics of a validation join the row of the step before it."""

    def record(self, metrics: dict[str, Metric]) -> None: ...

    def finish_step(self, step: int) -> None: ...

    def resume_after(self, step: int) -> None: ...

    def close(self, *, failed: bool = False) -> None: ...


class StopRequests(Protocol):
    """Requests to stop the run; the current step may still finish."""

    def begin(self, step: int) -> None: ...

    def requested(self) -> bool: ...


class Profiler(Protocol):
    """Profiles of some steps."""

    def begin(self, step: int) -> None: ...

    def end(self, step: int) -> None:
        """End the step's profile after its training. A step that fails has none."""


@dataclass(kw_only=True)
class TrainingRun:
    """Parts that every run has."""

    config: Config
    actor: Actor
    journal: MetricsJournal
    checkpoints: Checkpoints
    remove_unfinished: Callable[[], None]
    """Removes files of a step that a crash interrupted."""
    positions: dict[str, Stateful]
    stops: StopRequests
    """Checked once at the end of each step; on a request the run saves and stops."""
    profiler: Profiler | None = None
    critic: Critic | None = None
    in_flight: InFlightGroups | None = None
    """Groups submitted ahead of the step that trains them; None in synchronous runs."""
    state: RunState = field(default_factory=RunState)


class TextObjective(Protocol):
    """Objective of a run without engines, which takes its batches from the data set."""

    @property
    def validates(self) -> bool:
        """True if `validate` has data."""

    def train(self, actor: Actor, step: int) -> dict[str, Metric]:
        """Train on the next batch and return the metrics of the step."""

    def validate(self, actor: Actor) -> dict[str, Metric]:
        """Return the metrics of the validation data, with the prefix val/."""


@dataclass(kw_only=True)
class SupervisedRun(TrainingRun):
    """Training run on texts of the data set: nothing is generated."""

    objective: TextObjective


@dataclass(kw_only=True)
class Run(TrainingRun):
    """Reinforcement learning run.

    `batch_of` builds a Batch (advantages, loss weights, updates) from collected groups, the step and the weight version
    at the start of the step. `describe` computes metrics of groups.
    """

    collector: Collector
    publisher: Publisher
    validator: Validator | None
    batch_of: Callable[[Groups, int, int], Batch]
    describe: Callable[[Groups], dict[str, Metric]]
    estimates_tokens: bool = False
    """True if the ranks compute per-token advantages; otherwise batch_of computes one per response."""
    reference: Reference | None = None
    teacher: Teacher | None = None
    """Teachers on engines, servers or ranks of their own; None for teachers on the actor's ranks."""
    entropy: EntropyController | None = None
    """Controller of the entropy bonus; None if its coefficient is fixed."""
    logp_gap: LogpGapCheck | None = None
    """Called once after the engines have received the initial weights, also in a resumed run."""
    validation_parts: ValidationParts = field(default_factory=ValidationParts)
    """Subsets of the validation prompts with separate metrics."""


def resume(run: TrainingRun) -> bool:
    """Restore the newest checkpoint of the run directory, if any. Records of later steps by earlier processes are set
    aside."""
    run.checkpoints.clean()
    run.remove_unfinished()
    resumed = load_latest(run)
    # Before the first step writes anything: records of later steps move aside.
    run.journal.resume_after(run.state.step if resumed else -1)
    return resumed


def load_latest(run: TrainingRun) -> bool:
    """Restore the newest checkpoint, if there is one.

    Raises: CheckpointError if it does not fit this configuration; DamagedCheckpointError naming what to remove.
    """
    newest = run.checkpoints.latest()
    if newest is None:
        return False
    step, path = newest
    try:
        state, files = run.checkpoints.read(path)
        _check_kind(run, state, path)
        _load_models(run, path, files)
    except DamagedCheckpointError as error:
        raise run.checkpoints.with_remedy(error, step) from None
    for name, part in run.positions.items():
        part.load_state_dict(state["positions"][name])
    run.state = RunState(step=state["step"], version=state["version"])
    return True


def load_policy(run: TrainingRun, step: int | None = None) -> None:
    """Restore the policy of a checkpoint, without what only training needs. `step`: None for the newest checkpoint, if
    there is one.

    Raises: as `load_latest`.
    """
    found = run.checkpoints.of_step(step)
    if found is None:
        return
    step, path = found
    try:
        state, files = run.checkpoints.read(path)
        if state.get("objective") == REWARD_MODEL:
            raise CheckpointError(f"{path} has a reward model, which generates no text; name another run")
        own, _ = split_files(files, CRITIC)
        own, _ = split_files(own, GROUPS)
        run.actor.load(str(path), own)
    except DamagedCheckpointError as error:
        raise run.checkpoints.with_remedy(error, step) from None
    run.state = RunState(step=state["step"], version=state["version"])


CRITIC, GROUPS = "critic", "rollouts"
"""Subdirectories of a checkpoint: the critic's files, and groups that no step has trained."""


def _load_models(run: TrainingRun, path: Path, files: Sequence[SavedFile]) -> None:
    """Verify and load the files of actor, critic and in-flight groups."""
    # All checks come before any rank loads: a run with half-loaded models could not continue.
    others, groups = split_files(files, GROUPS)
    if groups and run.in_flight is None:
        raise CheckpointError(
            f"{path} has groups that no step has trained, but this run is synchronous; restore rollout.max_staleness, "
            "or set run.dir to a new directory"
        )
    load_actor_and_critic(run.actor, run.critic, path, others)
    if groups and run.in_flight is not None:
        run.in_flight.load(str(path / GROUPS), groups)


def load_actor_and_critic(actor: Actor, critic: Critic | None, path: Path, files: Sequence[SavedFile]) -> None:
    """Verify and load the files of actor and critic.

    Raises: DamagedCheckpointError; CheckpointError if the checkpoint has a critic and the run has none, or vice versa.
    """
    actor_files, critics = split_files(files, CRITIC)
    if (critic is None) != (not critics):
        there, wanted = ("a", "none") if critics else ("no", "one")
        raise CheckpointError(f"{path} has {there} critic, but this run has {wanted}; set run.dir to a new directory")
    actor.load(str(path), actor_files)
    if critic is not None:
        critic.load(str(path / CRITIC), critics)


def _check_kind(run: TrainingRun, state: CheckpointState, path: Path) -> None:
    saved, wanted = set(state["positions"]), set(run.positions)
    for name, (what, key) in CONTROLLERS.items():
        if name in saved ^ wanted:
            there, here = ("an", "none") if name in saved else ("no", "one")
            raise CheckpointError(
                f"{path} has {there} adaptive {what} coefficient, but this run has {here}: restore {key}, or set "
                "run.dir to a new directory"
            )
    if saved != wanted:
        raise CheckpointError(f"{path} belongs to a different kind of run; set run.dir to a new directory")
    # Runs on texts have the same positions, whatever they train.
    objective = run.config.trainer.objective
    if (before := state.get("objective", objective)) != objective:
        raise CheckpointError(
            f"{path} belongs to a run with trainer.objective={before}, but this run has trainer.objective={objective}: "
            "restore the key, or set run.dir to a new directory"
        )


def steps_left(run: TrainingRun) -> Iterator[int]:
    """Yield the remaining steps up to trainer.steps. A step is in progress until the next one is requested."""
    for step in range(run.state.step + 1, run.config.trainer.steps + 1):
        # A signal from now on waits for the end of this step.
        run.stops.begin(step)
        if run.profiler is not None:
            run.profiler.begin(step)
        yield step


def end_profile(run: TrainingRun) -> None:
    """End the profile of the step that has just been trained, if it has one."""
    if run.profiler is not None:
        run.profiler.end(run.state.step)


def save(run: TrainingRun, accuracy: float | None = None) -> None:
    """Save everything that the next step depends on; with checkpoint.async_save, only start saving. May be called
    between any two steps; does nothing if this step is already saved. `accuracy` of a validation at this step is used
    by checkpoint.keep_best."""
    state: CheckpointState = {
        "step": run.state.step,
        "version": run.state.version,
        "accuracy": accuracy,
        "positions": {name: part.state_dict() for name, part in run.positions.items()},
        "objective": run.config.trainer.objective,
    }
    # The positions above are read before the ranks start to write: a step may continue while they write.
    in_background = run.config.checkpoint.async_save

    def start(directory: str) -> PendingSave:
        return _start_save(run, Path(directory), snapshot=in_background)

    run.checkpoints.save(run.state.step, state, start, wait=not in_background)


def _start_save(run: TrainingRun, directory: Path, *, snapshot: bool) -> PendingSave:
    saves: dict[str, PendingSave] = {}
    if run.in_flight is not None:
        (directory / GROUPS).mkdir()
        saves[GROUPS] = run.in_flight.start_save(str(directory / GROUPS))
    saves[""] = run.actor.start_save(str(directory), snapshot=snapshot)
    if run.critic is not None:
        (directory / CRITIC).mkdir()
        saves[CRITIC] = run.critic.start_save(str(directory / CRITIC), snapshot=snapshot)
    return saves[""] if len(saves) == 1 else JoinedSave(saves)


@contextlib.contextmanager
def saves_settled(run: TrainingRun) -> Iterator[None]:
    """Complete a running save before the run ends, also if the block raises one of this project's errors. Ctrl-C does
    not wait; the previous checkpoint stays the newest then."""
    try:
        yield
    except McoreRLError:
        # The error of the block is the cause. An error of the save must not hide it.
        with contextlib.suppress(McoreRLError):
            run.checkpoints.settle()
        raise
    run.checkpoints.settle()
