"""Typed errors. The command line maps them to exit codes; nothing else inspects their text."""

import errno
import os

_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


class McoreRLError(Exception):
    """Base of every error that this project raises on purpose."""

    exit_code = 1


class ConfigError(McoreRLError):
    """Input that the user can mend: a key, a file, a row, a size. Says what to set. Exit code 2."""

    exit_code = 2


class DataError(ConfigError):
    """A data file that is missing, empty or malformed; the message names file and line."""


class WorkerDiedError(McoreRLError):
    """A process of the run ended unexpectedly; the message names its role, rank and cause."""


class ClusterDiedError(WorkerDiedError):
    """Ray's own processes ended under the run: nothing more can be asked of any of its processes."""


class PeerLostError(WorkerDiedError):
    """A process waited for another one that is gone or silent: where it died, its death is what has to be told."""


class NonFiniteError(McoreRLError):
    """A loss or gradient is not finite; raised on every rank before the optimizer step, naming the samples."""


class RewardError(McoreRLError):
    """Too many responses could not be graded; the message names the function and its first error."""


class CurriculumError(McoreRLError):
    """A user's function did not say which rows an epoch draws; the message names it, and file and line."""


class SandboxError(McoreRLError):
    """Code of a model could not be run at all: the sandbox itself failed; the message has its words."""


class WeightSyncError(McoreRLError):
    """A weight hand-over that was not acknowledged, or that verification found to differ."""


class CheckpointError(McoreRLError):
    """A checkpoint that cannot be read back or does not belong to this run."""


class RunDirLostError(McoreRLError):
    """The run directory was deleted or taken by another run while this run was using it."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint of which a file is missing or holds other bytes than were written; the message names it. Exit code
    2: the user removes it."""

    exit_code = 2


class OffloadedError(McoreRLError):
    """Model or optimizer state was used while it lies in host memory; the message names the part."""


def storage_error(error: OSError) -> ConfigError | None:
    """What the user can mend about a failed write: a disk that is full or read-only; None for anything else."""
    if error.errno not in _CANNOT_WRITE:
        return None
    where = f" ({error.filename})" if error.filename else ""
    return ConfigError(f"run.dir: {os.strerror(error.errno)}{where}; free some space or set run.dir to another disk")
