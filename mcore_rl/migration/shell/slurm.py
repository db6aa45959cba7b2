"""Variables that SLURM sets from the `#SBATCH` lines of a job script."""

from __future__ import annotations

import re

_OPTION = re.compile(r"^#SBATCH\s+(--[\w-]+|-\w)(?:\s*=\s*|\s+)(\S+)", re.MULTILINE)
_GPUS = re.compile(r"(?:gpu:)?(?:[\w.]+:)?(\d+)")
NAMES = {
    "--nodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "-N": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "-c": ("SLURM_CPUS_PER_TASK",),
}
"""Option -> variables with its number."""
GPU_OPTIONS = ("--gpus-per-node", "--gres")


def job_variables(script: str) -> dict[str, str]:
    """Return the variables of a job script; empty for other scripts."""
    variables: dict[str, str] = {}
    for option, value in _OPTION.findall(script):
        if option in NAMES and value.isdigit():
            variables |= dict.fromkeys(NAMES[option], value)
        elif option in GPU_OPTIONS and (match := _GPUS.fullmatch(value)) is not None:
            variables |= dict.fromkeys(("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"), match[1])
    return variables
