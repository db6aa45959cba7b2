"""Checks of what transfers between GPUs need: versions of NCCL, and access to InfiniBand."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from mcore_rl.doctor.checks import GIB, Check, Need
from mcore_rl.resolved.installed import has_module
from mcore_rl.resolved.nccl import nccl_packages

MIN_LOCKED_BYTES = 64 * GIB
"""Memory that a process may lock: InfiniBand locks the buffers of all its peers and the memory that NIXL registers."""
SEVERAL_NODES = "GPUs of several nodes"


def check_network() -> list[Check]:
    """Check NCCL; on machines with GPUs also the access to InfiniBand."""
    access = [check_locked_memory(), *check_infiniband()] if _has_gpus() else []
    return [*check_nccl(), *access]


def _has_gpus() -> bool:
    if not has_module("torch"):
        return False
    try:
        import torch

        return torch.cuda.is_available()
    except Exception:  # a torch that cannot load its libraries has a check of its own
        return False


def check_locked_memory() -> Check:
    """Check the soft limit of locked memory. Without enough, NCCL fails: `ibv_reg_mr: Cannot allocate memory`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Check(
        "locked memory",
        soft == resource.RLIM_INFINITY or soft >= MIN_LOCKED_BYTES,
        f"{_size(soft)} (hard limit {_size(hard)})",
        Need.EXTRA,
        SEVERAL_NODES,
        "ulimit -l unlimited (container: --ulimit memlock=-1 --cap-add=IPC_LOCK; SLURM: "
        "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf)",
    )


def _size(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 20} MiB"


def check_infiniband(root: Path = Path("/")) -> list[Check]:
    """Check that a device file of InfiniBand or RoCE can be opened; no check if the machine has no such device.

    Without access, NCCL uses sockets, which are 10 to 20 times slower, and reports nothing.
    """
    devices = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    if not devices:
        return []
    problems = [_open_problem(file) for file in sorted((root / "dev/infiniband").glob("uverbs*"))]
    problem, remedy = "", "load the module ib_uverbs (container: --device=/dev/infiniband --network=host)"
    if not problems:
        problem = ", but no /dev/infiniband/uverbs*"
    elif all(problems):
        problem = f", but {problems[0]}"
        remedy = "allow this user to read and write /dev/infiniband/uverbs* (container: --device=/dev/infiniband)"
    return [Check("infiniband", not problem, ", ".join(devices) + problem, Need.EXTRA, SEVERAL_NODES, remedy)]


def _open_problem(file: Path) -> str:
    """Return the error of opening a device file; "" if it can be opened."""
    # Only an open shows a container's rules for devices, which may forbid what the file's mode allows.
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/infiniband/{file.name}: {error.strerror}"
    return ""


def check_nccl() -> list[Check]:
    """Compare the NCCL of this environment with the one of SGLang's; no check if one of them has no NCCL."""
    packages = nccl_packages()
    if packages is None:
        return []
    return [
        Check(
            "NCCL of sglang",
            packages.connect,
            f"{packages.sglang[1]}, trainer ranks have {packages.trainer[1]}",
            Need.EXTRA,
            "sending weights with NCCL to SGLang's GPUs",
            f"{packages.remedy}; colocated engines do not need it",
        )
    ]
