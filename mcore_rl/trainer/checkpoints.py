"""Checkpoints of a run: written under a temporary name and renamed when complete; the newest and the best are kept."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict

from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.ports import PendingSave
from mcore_rl.trainer.proof import PROOF_FILE, STATE_FILE, check_content, check_file, read_proof, write_proof
from mcore_rl.types import SavedFile, SavedState
from mcore_rl.types.json import JsonObject
from model_converters.durable_files import sync

_NAME = re.compile(r"step_(\d+)")

logger = logging.getLogger(__name__)


class CheckpointState(TypedDict):
    """Content of state.json. `accuracy` is val/accuracy at the step, None without a validation; `positions` are the
    states of the run's components (such as the sampler) by name; `objective` is trainer.objective, which checkpoints of
    earlier versions lack."""

    step: int
    version: int
    accuracy: float | None
    positions: dict[str, JsonObject]
    objective: NotRequired[str]


class Copier(Protocol):
    """Copies complete checkpoints to another place while the run continues."""

    def begin(self) -> None: ...

    def finish(self) -> None: ...

    def stop(self) -> None: ...


@dataclass
class Checkpoints:
    """The `checkpoints/` directory of a run. A directory step_<n> is a checkpoint only if it has a proof
    (complete.json)."""

    directory: Path
    keep_last: int
    keep_best: int = 0
    span: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Records the time of `save` in the timeline."""
    copier: Copier | None = None
    _running: tuple[int, Path, PendingSave] | None = field(default=None, init=False)
    """Step, directory and save that the ranks have not finished."""

    def latest(self) -> tuple[int, Path] | None:
        """Return the newest complete checkpoint, or None if none was ever saved.

        A step_<n> without a proof is skipped with a warning. A damaged checkpoint raises instead: falling back to an
        older one would silently lose steps.

        Raises: DamagedCheckpointError naming what to remove; CheckpointError if all directories lack a proof.
        """
        named = self._named()
        proven = [(step, path) for step, path in named if (path / PROOF_FILE).exists()]
        if not proven:
            if named:
                names = ", ".join(sorted(path.name for _, path in named))
                raise CheckpointError(
                    f"{self.directory}: none of {names} is complete (no {PROOF_FILE}); remove them to start over"
                )
            return None
        step, path = proven[-1]
        try:
            read_proof(path)
        except DamagedCheckpointError as error:
            raise self.with_remedy(error, step) from None
        skipped = [newer.name for number, newer in reversed(named) if number > step]
        if skipped:
            logger.warning("%s: skipping %s: incomplete, no %s", self.directory, ", ".join(skipped), PROOF_FILE)
        return step, path

    def of_step(self, step: int | None) -> tuple[int, Path] | None:
        """Return the checkpoint of a step; None: the same as `latest`.

        Raises: as `latest`; CheckpointError if there is no complete one of this step.
        """
        if step is None:
            return self.latest()
        path = self.directory / f"step_{step}"
        if not (path / PROOF_FILE).exists():
            names = ", ".join(other.name for _, other in self.complete())
            raise CheckpointError(f"{path} is no complete checkpoint; complete in {self.directory}: {names or 'none'}")
        return step, path

    def with_remedy(self, error: DamagedCheckpointError, step: int) -> DamagedCheckpointError:
        """Append the remedy for the damaged checkpoint of `step` to the error."""
        older = [name for number, name in self.complete() if number < step]
        start = f"{older[-1].name} is complete" if older else "there is no older one"
        aim = "resume from it" if older else "start over"
        return DamagedCheckpointError(f"{error}; {start}: remove step_{step} to {aim}")

    def save(
        self, step: int, state: CheckpointState, start: Callable[[str], PendingSave], *, wait: bool = True
    ) -> None:
        """Save a checkpoint: write state.json into a temporary directory and pass its path to `start`, with which the
        ranks begin to write.

        When all ranks have written, the proof is added and the directory is renamed. Old checkpoints are then removed,
        except for the keep_last newest and the keep_best highest by state["accuracy"]. Without `wait`, this happens in
        a later call of poll, settle or save. A step that is already saved is not saved again.

        Raises: errors of the ranks, also from the previous save.
        """
        with self.span("checkpoint"):
            # One save at a time: errors of the previous one must appear before another directory is written.
            self.settle()
            if self._is_complete(self.directory / f"step_{step}"):
                return
            self.clean()
            temporary = self.directory / f".step_{step}.partial"
            temporary.mkdir(parents=True)
            (temporary / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")
            self._running = step, temporary, start(str(temporary))
            if wait:
                self.settle()

    def poll(self) -> None:
        """Complete the running save if all ranks have finished; does not wait.

        Raises: same as save.
        """
        if self._running is not None and self._running[-1].done():
            self.settle()

    def settle(self) -> None:
        """Wait for the running save, if any, and complete it.

        Raises: same as save.
        """
        if self._running is None:
            return
        # Cleared first, so that a save that fails is not completed again by the next call.
        (step, directory, ranks), self._running = self._running, None
        write_proof(directory, ranks.result(), [STATE_FILE])
        # Each rank has already synced its own files to disk.
        for path in (STATE_FILE, PROOF_FILE, "."):
            sync(directory / path)
        # A step_<n> that exists here is incomplete or damaged, since `save` skips complete ones.
        final = self.directory / f"step_{step}"
        if final.exists():
            self._discard(final)
        # The rename makes the checkpoint visible, so everything is on disk before. Syncing the directory makes the
        # rename durable.
        os.replace(directory, final)
        sync(self.directory)
        complete = self.complete()
        best = self._best(complete)
        for number, old in complete[: -self.keep_last]:
            if number not in best:
                self._discard(old)
        if self.copier is not None:
            self.copier.begin()

    @contextmanager
    def copied(self) -> Iterator[None]:
        """Wait at the end of the block until its saves are copied, if they are to be. An error of the block stops
        copying instead.

        Raises: StorageError if they cannot be copied.
        """
        try:
            yield
        except BaseException:
            if self.copier is not None:
                self.copier.stop()
            raise
        if self.copier is not None:
            self.copier.finish()

    @staticmethod
    def read(path: Path) -> tuple[CheckpointState, tuple[SavedFile, ...]]:
        """Return the state and the files of a checkpoint.

        Raises: DamagedCheckpointError.
        """
        files = read_proof(path)
        check_file(path, files, STATE_FILE)
        return json.loads((path / STATE_FILE).read_text(encoding="utf-8")), files

    def clean(self) -> None:
        """Remove directories that a crash left partly written or partly removed."""
        # Names with a leading dot are never read as checkpoints.
        for path in self.directory.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def _named(self) -> list[tuple[int, Path]]:
        if not self.directory.is_dir():
            return []
        paths = self.directory.iterdir()
        return sorted((step, path) for path in paths if (step := step_of(path.name)) is not None)

    def complete(self) -> list[tuple[int, Path]]:
        """Return steps and directories of all complete checkpoints, oldest first."""
        return [(step, path) for step, path in self._named() if self._is_complete(path)]

    def _best(self, complete: Sequence[tuple[int, Path]]) -> set[int]:
        """Return the steps with the highest accuracy; the earlier step wins a tie."""
        known = [(self._accuracy(path), step) for step, path in complete] if self.keep_best else []
        # The highest accuracy first; with equal ones, the lowest step.
        ranked = sorted((-accuracy, step) for accuracy, step in known if accuracy is not None)
        return {step for _, step in ranked[: self.keep_best]}

    def _accuracy(self, path: Path) -> float | None:
        """Return the accuracy of a checkpoint; None if it is damaged, which must not end a run that saves a new one."""
        try:
            return self.read(path)[0].get("accuracy")
        except DamagedCheckpointError as error:
            logger.warning("%s; ignored by checkpoint.keep_best", error)
            return None

    @staticmethod
    def _is_complete(path: Path) -> bool:
        try:
            read_proof(path)
        except DamagedCheckpointError:
            return False
        return True

    def _discard(self, path: Path) -> None:
        # Rename first, so that a crash during removal cannot leave a step_<n> with missing files.
        doomed = path.with_name(f".{path.name}.removed")
        os.replace(path, doomed)
        shutil.rmtree(doomed)


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's directory name; None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def newest_step(run_dir: Path) -> int | None:
    """Return the step from which the next start in this run directory resumes, or None without a checkpoint.

    Raises: same as Checkpoints.latest.
    """
    newest = Checkpoints(run_dir / "checkpoints", keep_last=1).latest()
    return None if newest is None else newest[0]


def check_newest(run_dir: Path) -> None:
    """Check for damage in the checkpoint that the next start in this run directory resumes, before any process starts.

    Raises: same as Checkpoints.latest.
    """
    check_step(run_dir, None)


def check_step(run_dir: Path, step: int | None) -> None:
    """Make the check of `check_newest` for the checkpoint of a step; None: the newest one."""
    checkpoints = Checkpoints(run_dir / "checkpoints", keep_last=1)
    found = checkpoints.of_step(step)
    if found is None:
        return
    step, path = found
    try:
        check_content(path, read_proof(path))
    except DamagedCheckpointError as error:
        raise checkpoints.with_remedy(error, step) from None


@dataclass(frozen=True)
class JoinedSave:
    """Save of several models that is complete when all `parts` are complete; one proof covers all. Keys of `parts` are
    directories of the checkpoint, "" for its top level."""

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
