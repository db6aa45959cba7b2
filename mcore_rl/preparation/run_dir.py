"""Creation of the run directory, which only its user can read, and of the resolved configuration in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from mcore_rl.config import Config
from mcore_rl.config.run_configs import replace_config
from mcore_rl.config.schema import RunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.trainer.checkpoints import Checkpoints

CHECKPOINTS = "checkpoints"


def open_run_dir(run: RunConfig) -> Path:
    """Return the run directory. If it is missing, create it for this user alone; otherwise keep its mode."""
    directory = Path(run.dir)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def remove_partial_checkpoints(run_dir: Path) -> None:
    """Remove checkpoints that were not completed. Requires that no process of a run is writing there."""
    Checkpoints(run_dir / CHECKPOINTS, keep_last=1).clean()


def make_run_dir(config: Config, checkpoint_bytes: int, take_lock: Callable[[], None]) -> list[str]:
    """Make the run directory, lock it, and write the resolved configuration into it. Return the keys that have changed
    since the previous start, in the format of replace_config.

    Raises: ConfigError if it cannot be written, another run holds it, or a checkpoint would not fit.
    """
    directory = Path(config.run.dir)
    try:
        open_run_dir(config.run)
        take_lock()
        for name in ("rollouts", CHECKPOINTS):
            (directory / name).mkdir(exist_ok=True)
        remove_partial_checkpoints(directory)  # before the free space is measured
        free = shutil.disk_usage(directory).free
        if free < checkpoint_bytes:
            raise ConfigError(
                f"run.dir={directory}: {free / 2**20:.0f} MiB free, but one checkpoint needs about "
                f"{checkpoint_bytes / 2**20:.0f} MiB; set run.dir to a larger disk"
            )
        return replace_config(config, directory)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"run.dir={directory} cannot be written: {reason}; set run.dir to another place") from None
