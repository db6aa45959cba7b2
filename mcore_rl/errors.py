"""Typed errors. The command line maps them to exit codes; no other code inspects their text."""

import errno
import os

# Full disk, quota, read-only file system, and a limit on the size of a file.
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}

# No permission, a name that is too long, and links in a circle.
_CANNOT_REACH = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP}


class McoreRLError(Exception):
    """Base class of all errors that this project raises on purpose."""

    exit_code = 1


class ConfigError(McoreRLError):
    """Invalid input that the user can correct: a key, file, row or size. The message names the remedy. Exit code 2."""

    exit_code = 2


class DataError(ConfigError):
    """A data file is missing, empty or malformed; the message names the file and, if there is one, the line."""


class WorkerDiedError(McoreRLError):
    """A process of the run ended unexpectedly; the message names its role, rank and cause."""


class ClusterDiedError(WorkerDiedError):
    """Ray's own processes ended during the run; no process of the run can be called any more."""


class PeerLostError(WorkerDiedError):
    """A peer process ended or stopped responding. If the peer died, its WorkerDiedError is reported instead."""


class NonFiniteError(McoreRLError):
    """A loss or gradient is not finite; raised on every rank before the optimizer step, naming the samples."""


class RewardError(McoreRLError):
    """Too many responses could not be graded; the message names the function and its first error."""


class TeacherError(McoreRLError):
    """A teacher's server does not answer, or its answer has no log-probabilities of the tokens that were sent; the
    message names the server."""


class CurriculumError(McoreRLError):
    """A user's curriculum function failed or returned invalid rows for an epoch; the message names the function, its
    file and the line."""


class SandboxError(McoreRLError):
    """The sandbox itself failed, so that the model's code could not run; the message contains its output."""


class WeightSyncError(McoreRLError):
    """A weight sync was not acknowledged, or verification found different tensors."""


class CheckpointError(McoreRLError):
    """A checkpoint cannot be read or does not belong to this run."""


class StorageError(McoreRLError):
    """Files could not be uploaded; the message names the key, the URL and the local files."""


class RunDirLostError(McoreRLError):
    """The run directory was deleted, or another run took it over, during the run."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing or its bytes have changed; the message names it. Exit code 2: the user removes
    it."""

    exit_code = 2


class OffloadedError(McoreRLError):
    """Model or optimizer state was used while it was in host memory; the message names the part."""


def storage_error(error: OSError) -> ConfigError | None:
    """Return an error with a remedy for a failed write to a full or read-only disk; None for other errors."""
    if error.errno not in _CANNOT_WRITE:
        return None
    where = f" ({error.filename})" if error.filename else ""
    return ConfigError(f"run.dir: {os.strerror(error.errno)}{where}; free some space or set run.dir to another disk")


def path_error(error: OSError) -> ConfigError | None:
    """Return an error with a remedy for a path that this process may not or cannot reach; None for other errors."""
    if error.errno not in _CANNOT_REACH or not error.filename:
        return None
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    return ConfigError(f"{path}: {os.strerror(error.errno)}; name another path, or correct its permissions or links")
