"""Checks of what transfers between GPUs need: versions of NCCL, and access to InfiniBand."""

from __future__ import annotations

import importlib.metadata
import resource
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from mcore_rl.config.rules.engine_support import sglang_packages
from mcore_rl.doctor.checks import GIB, Check, Need
from mcore_rl.resolved.installed import has_module, release

NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
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
    """Check that the device files of InfiniBand or RoCE exist; no check if the machine has no such device.

    Without access, NCCL uses sockets, which are 10 to 20 times slower, and reports nothing.
    """
    devices = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    usable = any((root / "dev/infiniband").glob("uverbs*"))
    found = ", ".join(devices) + ("" if usable else ", but no /dev/infiniband/uverbs*")
    remedy = "load the module ib_uverbs (container: --device=/dev/infiniband --network=host)"
    return [Check("infiniband", usable, found, Need.EXTRA, SEVERAL_NODES, remedy)] if devices else []


def check_nccl() -> list[Check]:
    """Compare the NCCL of this environment with the one of SGLang's; no check if one of them has no NCCL."""
    ours = nccl_in([Path(sysconfig.get_path("purelib"))])
    theirs = nccl_in(sglang_packages())
    return [compare_nccl(ours, theirs)] if ours and theirs else []


def nccl_in(folders: Iterable[Path]) -> tuple[str, str] | None:
    """Return (package, version) of NCCL in the first of these folders of packages that has it."""
    for folder in folders:
        for name in NCCL:
            for distribution in importlib.metadata.distributions(name=name, path=[str(folder)]):
                return name, distribution.version
    return None


def compare_nccl(ours: tuple[str, str], theirs: tuple[str, str]) -> Check:
    """Check that packages of NCCL, each (package, version), have one version: others do not connect."""
    package, newest = max(ours, theirs, key=lambda each: release(each[1]))
    return Check(
        "NCCL of sglang",
        release(ours[1])[:3] == release(theirs[1])[:3],
        f"{theirs[1]}, trainer ranks have {ours[1]}",
        Need.EXTRA,
        "sending weights with NCCL to SGLang's GPUs",
        f"install one version of {package} in both environments (pip install --no-deps {package}=={newest}), or set "
        "weights.transport=shared_memory if all ranks are on one host; colocated engines do not need it",
    )
