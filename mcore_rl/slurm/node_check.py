"""Check of a node: `python -m mcore_rl.slurm.node_check`, once per node before the job starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from mcore_rl.slurm.meeting import node_name, parse_options, put_name

NEEDED = ("torch", "ray", "megatron.core")
SECONDS_FOR_GPUS = 60
"""Timeout of nvidia-smi, which takes many seconds without persistence mode and never returns with a hung driver."""


def main() -> int:
    """Create ATTEMPT/checked/NODE, or print the problem of the node and return 1."""
    options = parse_options(__doc__, {"gpus": "number of GPUs that must respond"})
    problem = packages() or memory() or gpus(options.gpus) or storage(options.attempt)
    if problem is None:
        try:
            put_name(options.attempt / "checked")
        except OSError as error:
            problem = f"run.dir cannot be written here: {error}"
    print(f"{node_name()}: {problem or 'ready'}")
    return 1 if problem else 0


def packages() -> str | None:
    """Check that the required packages are installed for this interpreter. Like all checks, returns the problem or
    None."""
    for name in NEEDED:
        try:
            is_installed = importlib.util.find_spec(name) is not None
        # For `megatron.core`, find_spec imports `megatron`, which may be missing.
        except ModuleNotFoundError:
            is_installed = False
        if not is_installed:
            return f"{name} is not installed for {sys.executable}; activate the environment in slurm.setup"
    return None


def memory() -> str | None:
    """Check that /dev/shm, the directory of the staging buffers, can be written."""
    return None if os.access("/dev/shm", os.W_OK) else "/dev/shm cannot be written; weight syncs need it"


def gpus(expected: int) -> str | None:
    """Check that nvidia-smi lists the expected number of GPUs."""
    if expected == 0:
        return None
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_FOR_GPUS, check=False)
    except FileNotFoundError:
        return "nvidia-smi was not found: no NVIDIA driver"
    except subprocess.TimeoutExpired:
        return f"nvidia-smi has not answered for {SECONDS_FOR_GPUS} s"
    if answer.returncode:
        return f"nvidia-smi failed: {' '.join((answer.stdout + answer.stderr).split())}"
    # Other lines are warnings.
    uuids = [line for line in answer.stdout.splitlines() if line.startswith(("GPU-", "MIG-"))]
    return (
        None if len(uuids) >= expected else f"nvidia-smi lists {len(uuids)} GPUs, but cluster.gpus_per_node={expected}"
    )


def storage(attempt: Path) -> str | None:
    """Check that run.dir is shared with the first node."""
    if not (attempt / "token").is_file():
        return f"{attempt} is not visible here: run.dir must be on storage that all nodes share"
    return None


if __name__ == "__main__":
    sys.exit(main())
