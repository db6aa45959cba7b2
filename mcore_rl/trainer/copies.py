"""Copies of a run's checkpoints at checkpoint.copy_to.

A process writes them while the run continues: `python -m mcore_rl.trainer.copies URL DIRECTORY`. A start without a
checkpoint fetches the newest one from there.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rl.errors import ConfigError, McoreRLError, StorageError
from mcore_rl.parent_death import guarded
from mcore_rl.remote.mirror import Mirror
from mcore_rl.trainer.checkpoints import Checkpoints, step_of
from mcore_rl.trainer.proof import PROOF_FILE

KEY = "checkpoint.copy_to"
LOG = "checkpoint_copies.log"

logger = logging.getLogger(__name__)


def mirror_at(url: str) -> Mirror:
    return Mirror(KEY, url, PROOF_FILE)


def copied_steps(url: str) -> list[int]:
    """Return the steps of the complete copies, in order. Raises: ConfigError if they cannot be read."""
    return sorted(step for name in mirror_at(url).complete() if (step := step_of(name)) is not None)


def check_copies(url: str, directory: Path) -> None:
    """Require that the copies can be read, and that none is newer than the checkpoints in `directory`, if there are
    any: the copies would then belong to another run, or the run would repeat steps and replace them.

    Raises: ConfigError; errors of the newest checkpoint.
    """
    copied, newest = copied_steps(url), Checkpoints(directory, keep_last=1).latest()
    if copied and newest is not None and copied[-1] > newest[0]:
        raise ConfigError(
            f"{KEY}={url} has a checkpoint of step {copied[-1]}, but the newest in {directory} is of step {newest[0]}; "
            f"set {KEY} to another address, or run.dir to a new directory to resume from the copy"
        )


def fetch_newest(url: str, directory: Path, show: Callable[[str], None]) -> None:
    """Fetch the newest copy if `directory` has no checkpoint. A fetch that was cut leaves nothing that is read.

    Raises: ConfigError if a file cannot be read; DamagedCheckpointError if one has another size than was saved.
    """
    copied, checkpoints = copied_steps(url), Checkpoints(directory, keep_last=1)
    if not copied or checkpoints.latest() is not None:
        return
    name = f"step_{copied[-1]}"
    show(f"{KEY}: fetching {name} from {url}")
    checkpoints.clean()
    temporary = directory / f".{name}.partial"
    temporary.mkdir(parents=True)
    mirror_at(url).fetch(name, temporary)
    checkpoints.read(temporary)
    os.replace(temporary, directory / name)


@dataclass
class CheckpointCopies:
    """Copies complete checkpoints of `directory` in a process with the lowest priority.

    An error does not concern the training: it is logged, and the next checkpoint or `finish` tries again. The output of
    the process is in checkpoint_copies.log in `logs`.
    """

    url: str
    directory: Path
    logs: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def begin(self) -> None:
        """Begin to copy after a save. A process that is still copying finds the new checkpoint by itself."""
        if self._process is not None and self._process.poll() is None:
            return
        self._warn_of_failure()
        self._start()

    def finish(self) -> None:
        """Wait until all checkpoints are copied. Raises: StorageError if they cannot be."""
        if self._process is not None:
            self._process.wait()
            self._warn_of_failure()
        # The process may have looked for checkpoints before the last one was complete.
        process = self._start()
        if process.wait() != 0:
            raise StorageError(f"the checkpoints in {self.directory} are not copied: {self._reason()}")

    def stop(self) -> None:
        """Stop copying; the next start continues."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        # guarded: a driver that is killed does not leave the process behind.
        command = guarded(sys.executable, "-m", __name__, self.url, str(self.directory))
        with (self.logs / LOG).open("ab") as log:
            # A session of its own: the first Ctrl-C finishes the step, and must not end the copy.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self._process

    def _warn_of_failure(self) -> None:
        if self._process is not None and self._process.poll():
            logger.warning("%s: %s; the next checkpoint is tried again", KEY, self._reason())

    def _reason(self) -> str:
        lines = (self.logs / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else "no output"


def copy_all(url: str, directory: Path) -> None:
    """Copy the checkpoints that have no copy, the newest first, until there is none left. Then remove copies of older
    steps whose checkpoints have been removed.

    Raises: ConfigError, StorageError.
    """
    mirror = mirror_at(url)
    while _copy_newest(mirror, directory):
        pass
    kept = [step for step, _ in Checkpoints(directory, keep_last=1).complete()]
    for step in copied_steps(url):
        if kept and step not in kept and step < kept[-1]:
            mirror.remove(f"step_{step}")


def _copy_newest(mirror: Mirror, directory: Path) -> bool:
    """Copy the newest checkpoint that has no copy. Returns False if there is none. Raises: StorageError."""
    for path in reversed(_kept(directory)):
        try:
            if mirror.has(path):
                continue
            mirror.upload(path)
        except StorageError:
            # A newer checkpoint has replaced it meanwhile.
            if path.exists():
                raise
        return True
    return False


def _kept(directory: Path) -> list[Path]:
    return [path for _, path in Checkpoints(directory, keep_last=1).complete()]


def main(arguments: Sequence[str]) -> int:
    url, directory = arguments
    # Training is more urgent.
    os.nice(19)
    try:
        copy_all(url, Path(directory))
    except McoreRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
