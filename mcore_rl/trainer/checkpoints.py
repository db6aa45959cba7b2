"""Checkpoints of a run: written under a temporary name, renamed when complete, the last few and the best kept."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.ports import PendingSave
from mcore_rl.trainer.proof import (
    PROOF_FILE,
    STATE_FILE,
    Proof,
    check_content,
    check_file,
    read_proof,
    write_proof,
)

ACCURACY = "accuracy"
"""In the state: val/accuracy at the step, None where it was not validated."""
_NAME = re.compile(r"step_(\d+)")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Unfinished:
    """A save that the ranks are at."""

    step: int
    directory: Path
    ranks: PendingSave


@dataclass
class Checkpoints:
    """The `checkpoints/` directory of a run. A step_<n> with a proof (complete.json) was complete when it got its name;
    one without is no checkpoint."""

    directory: Path
    keep_last: int
    keep_best: int = 0
    _unfinished: _Unfinished | None = field(default=None, init=False)

    def latest(self) -> tuple[int, Path] | None:
        """The newest complete checkpoint, or None when there never was one.

        A step_<n> without a proof is passed over, with a warning. A damaged one is not: what came after the one before
        would be lost without a word.

        Raises: DamagedCheckpointError saying what to remove; CheckpointError when only directories without a proof
        are there.
        """
        passed_over = []
        for step, path in reversed(self._named()):
            if not (path / PROOF_FILE).exists():
                passed_over.append(path.name)
                continue
            try:
                read_proof(path)
            except DamagedCheckpointError as error:
                raise self.with_remedy(error, step) from None
            if passed_over:
                logger.warning("%s: %s lack %s: not complete", path.parent, ", ".join(passed_over), PROOF_FILE)
            return step, path
        if passed_over:
            raise CheckpointError(
                f"{self.directory}: none of {', '.join(sorted(passed_over))} is complete (no {PROOF_FILE}); "
                "remove them to start over"
            )
        return None

    def with_remedy(self, error: DamagedCheckpointError, step: int) -> DamagedCheckpointError:
        """The error with what the user can do about the checkpoint of `step`."""
        older = [name for number, name in self._complete() if number < step]
        start = f"{older[-1].name} is complete" if older else "there is no older one"
        aim = "resume from it" if older else "start over"
        return DamagedCheckpointError(f"{error}; {start}: remove step_{step} to {aim}")

    def save(self, step: int, state: dict[str, Any], start: Callable[[str], PendingSave], *, wait: bool = True) -> None:
        """Has the ranks write into a directory with a temporary name; `start` is given its path. The checkpoint counts
        once all have written, with `state` as JSON and the proof beside it: then it gets its name, and old ones go, but
        for those of the highest state["accuracy"].

        Without `wait` that happens in a later call of poll, settle or save. A step that is saved is not saved again.

        Raises: what the ranks raised, also those of the save before.
        """
        self.settle()
        if self._is_whole(self.directory / f"step_{step}"):
            return
        self.clean()
        temporary = self.directory / f".step_{step}.partial"
        temporary.mkdir(parents=True)
        (temporary / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        self._unfinished = _Unfinished(step, temporary, start(str(temporary)))
        if wait:
            self.settle()

    def poll(self) -> None:
        """Finishes a save that all ranks are done with. Returns at once.

        Raises: as save.
        """
        if self._unfinished is not None and self._unfinished.ranks.done():
            self.settle()

    def settle(self) -> None:
        """Waits for a save that has not finished, and finishes it.

        Raises: as save.
        """
        if self._unfinished is None:
            return
        save, self._unfinished = self._unfinished, None
        write_proof(save.directory, save.ranks.result(), [STATE_FILE])
        # The ranks have made their own files durable, on the hosts that wrote them.
        for path in (STATE_FILE, PROOF_FILE, "."):
            _sync(save.directory / path)
        final = self.directory / f"step_{save.step}"
        if final.exists():
            self._discard(final)
        os.replace(save.directory, final)
        _sync(self.directory)
        complete = self._complete()
        best = self._best(complete)
        for step, old in complete[: -self.keep_last]:
            if step not in best:
                self._discard(old)

    @staticmethod
    def read(path: Path) -> tuple[dict[str, Any], Proof]:
        """The state saved with a checkpoint, and its proof.

        Raises: DamagedCheckpointError.
        """
        proof = read_proof(path)
        check_file(path, proof, STATE_FILE)
        return json.loads((path / STATE_FILE).read_text(encoding="utf-8")), proof

    def clean(self) -> None:
        """Removes what a crash left half-written or half-removed."""
        for path in self.directory.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def _named(self) -> list[tuple[int, Path]]:
        if not self.directory.is_dir():
            return []
        steps_and_paths = [
            (int(match[1]), path) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))
        ]
        return sorted(steps_and_paths)

    def _complete(self) -> list[tuple[int, Path]]:
        return [(step, path) for step, path in self._named() if self._is_whole(path)]

    def _best(self, complete: Sequence[tuple[int, Path]]) -> set[int]:
        """Steps of the checkpoints with the highest accuracy; the earlier one counts where two have the same."""
        known = [(self._accuracy(path), step) for step, path in complete] if self.keep_best else []
        ranked = sorted((-accuracy, step) for accuracy, step in known if accuracy is not None)
        return {step for _, step in ranked[: self.keep_best]}

    def _accuracy(self, path: Path) -> float | None:
        """None for a damaged checkpoint, which must not end the run that saves another one."""
        try:
            accuracy: float | None = self.read(path)[0].get(ACCURACY)
        except DamagedCheckpointError as error:
            logger.warning("%s; it is not among the best", error)
            return None
        return accuracy

    @staticmethod
    def _is_whole(path: Path) -> bool:
        try:
            read_proof(path)
        except DamagedCheckpointError:
            return False
        return True

    def _discard(self, path: Path) -> None:
        # Renamed first, so that a crash while removing never leaves a step_<n> that lacks files.
        doomed = path.with_name(f".{path.name}.removed")
        os.replace(path, doomed)
        shutil.rmtree(doomed)


def newest_step(run_dir: Path) -> int | None:
    """Of the checkpoint that a start in this run directory goes on from; None where there is none.

    Raises: as Checkpoints.latest.
    """
    newest = Checkpoints(run_dir / "checkpoints", keep_last=1).latest()
    return None if newest is None else newest[0]


def check_newest(run_dir: Path) -> None:
    """Looks for damage in the checkpoint that a start in this run directory goes on from, before a process starts.

    Raises: as Checkpoints.latest.
    """
    checkpoints = Checkpoints(run_dir / "checkpoints", keep_last=1)
    newest = checkpoints.latest()
    if newest is None:
        return
    step, path = newest
    try:
        check_content(path, read_proof(path))
    except DamagedCheckpointError as error:
        raise checkpoints.with_remedy(error, step) from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
