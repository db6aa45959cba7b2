"""State of a run at one moment, and the reading that repeats only if a file has changed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_rl.observe.metrics import FILE_NAME, ROLLOUTS
from mcore_rl.observe.report.alerts import Alert, alerts_of
from mcore_rl.observe.report.run_files import CONFIG, FAILURE, RunFiles, read_run
from mcore_rl.observe.signs import Sign
from mcore_rl.observe.watch.heartbeat import Heartbeat, HolderState
from mcore_rl.observe.watch.responses import LastResponses, last_responses

WINDOW = 20
"""Number of last steps of the mean times: lengths of responses, and so times, change during a run."""
Signature = tuple[tuple[int, int] | None, ...]
"""Modification time and size of each file that a snapshot depends on; None: it does not exist."""


@dataclass(frozen=True)
class Snapshot:
    """Contents of a run directory at one moment.

    holder: process that holds the directory; None: none, so the run is not in progress.
    step_seconds: time since the last finished step, by the modification time of metrics.jsonl; None without steps.
    """

    run: RunFiles
    alerts: list[Alert]
    responses: LastResponses
    holder: HolderState | None = None
    step_seconds: float | None = None

    @property
    def last_step(self) -> int | None:
        return max(self.run.records, default=None)

    @property
    def is_alive(self) -> bool:
        return self.holder is not None and self.holder.is_alive

    @property
    def all_steps_done(self) -> bool:
        total, last = self.run.total_steps, self.last_step
        return total is not None and last is not None and last >= total

    @property
    def has_finished(self) -> bool:
        """True if all steps are done and the process, which then saves and exports the model, has ended."""
        return self.all_steps_done and not self.is_alive

    def mean_of_last(self, name: str) -> float | None:
        """Return the mean of a metric over the last WINDOW training steps; None if none of them has it."""
        # Step 0 only validates.
        steps = [step for step in self.run.records if step > 0][-WINDOW:]
        known = [value for step in steps if (value := self.run.records[step].get(name)) is not None]
        return statistics.fmean(known) if known else None

    def seconds_left(self) -> float | None:
        """Estimate the time of the remaining steps from the last ones; None if it is unknown."""
        each, total = self.mean_of_last("time/step"), self.run.total_steps
        if each is None or total is None or self.last_step is None:
            return None
        elapsed = min(self.step_seconds or 0.0, each) if self.is_alive else 0.0
        return max(total - self.last_step, 0) * each - (0.0 if self.all_steps_done else elapsed)


class SnapshotReader:
    """Reads the files of a run again when one of them has changed."""

    def __init__(self, directory: Path, heartbeat: Heartbeat, signs: Sequence[Sign] | None = None) -> None:
        """`signs`: signs of collapse of the run; None: read them from its config.yaml."""
        self._directory, self._heartbeat, self._signs = directory, heartbeat, signs
        self._signature: Signature | None = None
        self._last: Snapshot | None = None

    def read(self) -> Snapshot:
        """Return the current state.

        Raises: ConfigError if the directory is no run, or no longer exists.
        """
        signature = self._current_signature()
        if self._last is None or signature != self._signature:
            run = read_run(self._directory)
            responses = last_responses(run)
            # After the responses, which add notes.
            self._last = Snapshot(run, alerts_of(run, self._signs), responses)
            # Taken before the reading: a change during it causes another one.
            self._signature = signature
        return replace(self._last, holder=self._heartbeat.holder(), step_seconds=self._step_seconds())

    def _current_signature(self) -> Signature:
        newest = [] if self._last is None else [file.path for file in self._last.run.rollouts[-1:]]
        names = (CONFIG, FILE_NAME, ROLLOUTS, FAILURE)
        return tuple(_state(path) for path in (*(self._directory / name for name in names), *newest))

    def _step_seconds(self) -> float | None:
        state = _state(self._directory / FILE_NAME)
        return None if state is None else max(time.time() - state[0] / 1e9, 0.0)


def _state(path: Path) -> tuple[int, int] | None:
    """Return modification time in ns and size; None if the path does not exist or cannot be read."""
    try:
        # Opening makes an NFS client ask the server for the current attributes.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        state = os.fstat(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return state.st_mtime_ns, state.st_size
