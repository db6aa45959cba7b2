"""Checks of what transfers between GPUs need: versions of NCCL."""

from __future__ import annotations

import importlib.metadata
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from mcore_rl.config.rules.engine_support import sglang_python
from mcore_rl.doctor.checks import Check, Need
from mcore_rl.resolved.installed import release

NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def check_nccl() -> list[Check]:
    """Compare the NCCL of this environment with the one of SGLang's; no check if one of them has no NCCL."""
    ours = nccl_in([Path(sysconfig.get_path("purelib"))])
    theirs = nccl_in(sglang_python().parents[1].glob("lib/python3*/site-packages"))
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
