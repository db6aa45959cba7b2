"""Creation of the run directory, and a lock that prevents two runs from writing into it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from mcore_rl.config import Config
from mcore_rl.config.run_configs import replace_config
from mcore_rl.config.schema import RunConfig
from mcore_rl.errors import ConfigError, RunDirLostError
from mcore_rl.trainer.checkpoints import Checkpoints

FILE_NAME = "run.lock"
CHECKPOINTS = "checkpoints"
LOGS, ATTEMPT = "logs", "attempt_"
SECONDS_BETWEEN_BEATS = 10.0
"""Interval at which the holder renews the modification time of the file."""
STALE_AFTER_SECONDS = 60.0
"""Age of the modification time after which a holder on another host counts as dead: six missed beats. A file server
may show clients a modification time that is some seconds old."""
SECONDS_TO_SETTLE = 2.0
"""Wait before reading the record again, on file systems without locks. The last of concurrent writers keeps the
directory."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@dataclass(frozen=True)
class Holder:
    """Process that holds a run directory, recorded as JSON in the lock file."""

    host: str
    pid: int
    started: str
    boot: str
    """Kernel instance; equal for all containers of a host, different after a restart."""
    job: str | None = None
    """SLURM job, if any."""
    # Distinguishes processes with equal pids in two containers of a host.
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def this_process(cls) -> Holder:
        """Describe the calling process."""
        started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return cls(socket.gethostname(), os.getpid(), started, _boot_id(), os.environ.get("SLURM_JOB_ID"))

    def describe(self) -> str:
        """Return `process 17 on host n3 (SLURM job 5), started 2026-11-25 10:00:00 UTC`."""
        job = "" if self.job is None else f" (SLURM job {self.job})"
        return f"process {self.pid} on host {self.host}{job}, started {self.started}"


class RunLock:
    """Lock on one run directory for the lifetime of this process.

    The kernel's lock (flock) decides between processes of one host, and between hosts where the file system shares
    locks; the kernel releases it when the holder dies. Some shared file systems keep flock local to a host or lack it.
    Therefore the holder also renews the file's modification time, and a record of another host counts as dead only
    after STALE_AFTER_SECONDS without renewal.
    """

    def __init__(self, directory: Path, wait_notice: Callable[[str], None], on_loss: Callable[[str], None]) -> None:
        """Create a lock that is not held yet.

        wait_notice: receives one line if `take` must wait.
        on_loss: called once, from another thread, with the reason when the directory is deleted or taken by another
        process while this one holds it.
        """
        self._directory, self._path = directory, directory / FILE_NAME
        self._wait_notice, self._on_loss = wait_notice, on_loss
        self._descriptor: int | None = None
        self._released = threading.Event()
        self._record = Holder.this_process()

    def take(self) -> None:
        """Acquire the lock; does nothing if this object holds it.

        Raises: ConfigError if another process holds it; OSError if the file cannot be written.
        """
        if self._descriptor is not None:
            return
        # O_NOFOLLOW: a link placed here by someone else must not let this process truncate its target.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            has_locks = self._lock(descriptor)
            before = read_holder(self._path)
            # With the kernel's lock acquired, a recorded holder on this host is dead. One on another host may live if
            # the file system keeps locks local.
            if before is not None and (before.boot != self._record.boot or not has_locks):
                self._wait_for_silence(before)
            self._write(descriptor)
            if not has_locks:
                time.sleep(SECONDS_TO_SETTLE)
                if not self._is_ours(descriptor):
                    raise self._in_use(read_holder(self._path))
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        # A daemon, because the thread must not keep a failed process alive.
        threading.Thread(target=self._beat, args=(descriptor,), name="run.dir lock", daemon=True).start()

    def release(self) -> None:
        """Release the lock and erase the record; the file stays, since removing a lock file is a race."""
        self._released.set()
        if self._descriptor is not None:
            # The directory may be gone or its file server unreachable; the record then becomes stale by itself.
            with contextlib.suppress(OSError):
                if self._is_ours(self._descriptor):
                    os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, descriptor: int) -> bool:
        """Take the kernel's lock. Returns whether the file system has locks."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use(read_holder(self._path)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def _wait_for_silence(self, before: Holder) -> None:
        """Wait until the record is STALE_AFTER_SECONDS old. Both times come from the file server, whose clock may
        differ from this host's.

        Raises: ConfigError if the holder renews the record meanwhile.
        """
        last = _modified(self._path)
        with tempfile.TemporaryFile(dir=self._directory) as file:
            left = STALE_AFTER_SECONDS - (os.fstat(file.fileno()).st_mtime - last)
        if left <= 0:
            return
        self._wait_notice(
            f"run.dir={self._directory} was held by {before.describe()}: waiting {left:.0f} s for it to renew the lock"
        )
        deadline = time.monotonic() + left
        while time.monotonic() < deadline:
            # Check several times per beat of the other holder.
            time.sleep(min(2.0, left / 10))
            if _modified(self._path) != last:
                raise self._in_use(read_holder(self._path) or before)

    def _write(self, descriptor: int) -> None:
        # Truncate first; otherwise the end of a longer earlier record would remain.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(asdict(self._record)) + "\n").encode(), 0)
        # Other hosts must be able to read the record at once.
        os.fsync(descriptor)

    def _is_ours(self, descriptor: int) -> bool:
        """Return whether the path still names our file and the file holds our record."""
        try:
            there, here = os.stat(self._path), os.fstat(descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return False
        same_file = (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
        holder = read_holder(self._path)
        return same_file and holder is not None and holder.token == self._record.token

    def _beat(self, descriptor: int) -> None:
        while not self._released.wait(SECONDS_BETWEEN_BEATS):
            try:
                if self._is_ours(descriptor):
                    os.utime(descriptor)
                    continue
            except OSError as error:
                if error.errno != errno.ESTALE:  # ESTALE: NFS reports that the file was deleted
                    continue  # the file server may come back; the next beat tries again
            if not self._released.is_set():
                self._on_loss(self._loss())
            return

    def loss(self) -> str | None:
        """Return how this process lost the directory, or None while it holds it or never did."""
        if self._descriptor is None or self._is_ours(self._descriptor):
            return None
        return self._loss()

    def _loss(self) -> str:
        holder = read_holder(self._path)
        if holder is None:
            return f"run.dir={self._directory} was deleted or replaced while this run was using it"
        return f"run.dir={self._directory} was taken by {holder.describe()} while this run was using it"

    def _in_use(self, holder: Holder | None) -> ConfigError:
        who = "another process" if holder is None else holder.describe()
        return ConfigError(
            f"run.dir={self._directory} is in use by {who}; wait until it ends, stop it, or set run.dir to another "
            "directory"
        )


@contextlib.contextmanager
def run_lock(
    directory: str, wait_notice: Callable[[str], None], on_loss: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Hold the lock of an existing run directory for the block. Yields a function that takes the lock; call it after
    creating a missing directory.

    Raises: ConfigError if another process holds it; RunDirLostError in place of any error of the block if the directory
    was deleted or taken meanwhile, because that is the likely cause of the error.
    """
    lock = RunLock(Path(directory), wait_notice, on_loss)

    def take() -> None:
        with _write_errors(directory):
            lock.take()

    try:
        if Path(directory).is_dir():
            take()
        yield take
    except Exception as error:
        if (loss := lock.loss()) is not None:
            raise RunDirLostError(loss) from error
        raise
    finally:
        lock.release()


@contextlib.contextmanager
def _write_errors(directory: str) -> Iterator[None]:
    """Raise ConfigError in place of an OSError of the block, which writes into the run directory."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"run.dir={directory} cannot be written: {reason}; set run.dir to another place") from None


def read_holder(path: Path) -> Holder | None:
    """Return the recorded holder, or None if there is no readable record."""
    try:
        record = json.loads(path.read_bytes())
        return Holder(**record)
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def holder_renewal(directory: Path) -> tuple[str, float] | None:
    """Return a description of the process that holds a run directory, and the time at which it last renewed the lock,
    in seconds since 1970 by the file server's clock. None if no process holds it. Only reads."""
    path = directory / FILE_NAME
    try:
        state = path.stat()
        # The record is erased when the lock is released.
        if not state.st_size:
            return None
        # Other users may see the directory, but not read the file.
        modified = _modified(path) if os.access(path, os.R_OK) else state.st_mtime
    except OSError:
        return None
    holder = read_holder(path)
    return f"a process whose record in {FILE_NAME} cannot be read" if holder is None else holder.describe(), modified


def _modified(path: Path) -> float:
    # Opening the file makes an NFS client ask the server for the current attributes.
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def open_run_dir(run: RunConfig) -> Path:
    """Return the run directory. If it is missing, create it for this user alone; otherwise keep its mode."""
    directory = Path(run.dir)
    # Records contain prompts and responses, which other users must not read.
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def make_log_folder(run_dir: Path) -> Path:
    """Create the folder for the output of this start, logs/attempt_<n>, numbered from 1. Requires the lock of the run
    directory, which makes the number unique.

    Raises: ConfigError if it cannot be written.
    """
    with _write_errors(str(run_dir)):
        logs = run_dir / LOGS
        logs.mkdir(exist_ok=True)
        numbers = [path.name.removeprefix(ATTEMPT) for path in logs.glob(f"{ATTEMPT}*")]
        folder = logs / f"{ATTEMPT}{max((int(each) for each in numbers if each.isdecimal()), default=0) + 1}"
        folder.mkdir()
        return folder


def remove_partial_checkpoints(run_dir: Path) -> None:
    """Remove checkpoints that were not completed. Requires that no process of a run is writing there."""
    Checkpoints(run_dir / CHECKPOINTS, keep_last=1).clean()


def make_run_dir(config: Config, checkpoint_bytes: int, take_lock: Callable[[], None]) -> list[str]:
    """Make the run directory, lock it, and write the resolved configuration into it. Return the keys that have changed
    since the previous start, in the format of replace_config.

    Raises: ConfigError if it cannot be written, another run holds it, or a checkpoint would not fit.
    """
    directory = Path(config.run.dir)
    with _write_errors(config.run.dir):
        open_run_dir(config.run)
        take_lock()
        for name in ("rollouts", CHECKPOINTS):
            (directory / name).mkdir(exist_ok=True)
        remove_partial_checkpoints(directory)  # before the free space is measured
        _check_space(directory, directory, checkpoint_bytes)
        return replace_config(config, directory)


def _check_space(directory: Path, existing: Path, checkpoint_bytes: int) -> None:
    """Require room for a checkpoint on the disk of `existing`, which is `directory` or a parent of it."""
    free = shutil.disk_usage(existing).free
    if free < checkpoint_bytes:
        raise ConfigError(
            f"run.dir={directory}: {free / 2**20:.0f} MiB free, but one checkpoint needs about "
            f"{checkpoint_bytes / 2**20:.0f} MiB; set run.dir to a larger disk"
        )


def check_can_create(directory: Path, checkpoint_bytes: int) -> None:
    """Make the checks of `make_run_dir` that need no change of the directory.

    Raises: ConfigError if the directory cannot be written or a checkpoint would not fit.
    """
    with _write_errors(str(directory)):
        existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        _check_space(directory, existing, checkpoint_bytes)
