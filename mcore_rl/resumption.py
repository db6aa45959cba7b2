"""Resumption of a stopped run: the command, and the step at which it continues."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.config.reading.overrides import with_override
from mcore_rl.config.schema import Config
from mcore_rl.errors import McoreRLError


def resume_advice(config: Config, files: Sequence[str], overrides: Sequence[str]) -> str:
    """Return `resume with: mcore-rl train ...`, a command that names run.dir and therefore continues this run. Call it
    before paths are made absolute: all paths of the command start at the same working directory."""
    # The address of a job's Ray cluster is not valid after the job.
    if config.cluster.address is not None and "SLURM_JOB_ID" in os.environ:
        return "submit the job script again to resume"
    # Keys of the job script have no effect on a run, and slurm.environment may hold private values.
    given = [each for each in overrides if not each.startswith(("slurm.", "slurm="))]
    return f"resume with: {shlex.join(['mcore-rl', 'train', *files, *with_override(given, 'run.dir', config.run.dir)])}"


def resume_hint(run_dir: Path, advice: str) -> str:
    """Describe where the next start of a stopped run begins. `advice`: result of resume_advice."""
    from mcore_rl.trainer.checkpoints import newest_step

    try:
        step = newest_step(run_dir)
    # The newest checkpoint is damaged; the message names the remedy.
    except McoreRLError as error:
        return str(error)
    if step is None:
        return "no checkpoint; the same command starts from the beginning"
    return f"step {step} is saved; {advice}"
