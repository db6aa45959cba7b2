"""NCCL in the environments of trainer ranks and of SGLang, from the metadata of its packages."""

from __future__ import annotations

import importlib.metadata
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.config.rules.engine_support import sglang_packages
from mcore_rl.resolved.installed import release

PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True)
class NcclPackages:
    """Packages of NCCL, each (name, version), in two environments."""

    trainer: tuple[str, str]
    sglang: tuple[str, str]

    @property
    def connect(self) -> bool:
        """True if NCCL connects processes of the two environments: it requires the same version."""
        return release(self.trainer[1])[:3] == release(self.sglang[1])[:3]

    @property
    def remedy(self) -> str:
        package, newest = max(self.trainer, self.sglang, key=lambda each: release(each[1]))
        return (
            f"install one version of {package} in both environments (pip install --no-deps {package}=={newest}), or "
            "set weights.transport=shared_memory if all ranks are on one host"
        )


def nccl_packages() -> NcclPackages | None:
    """Find NCCL in this environment and in SGLang's; None if one of them has no package of it."""
    ours = nccl_in([Path(sysconfig.get_path("purelib"))])
    theirs = nccl_in(sglang_packages())
    return NcclPackages(ours, theirs) if ours and theirs else None


def nccl_in(folders: Iterable[Path]) -> tuple[str, str] | None:
    """Return (package, version) of NCCL in the first of these folders of packages that has it."""
    for folder in folders:
        for name in PACKAGES:
            for distribution in importlib.metadata.distributions(name=name, path=[str(folder)]):
                return name, distribution.version
    return None
