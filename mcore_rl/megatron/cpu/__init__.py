"""The CPU backend: the real megatron-core on gloo, for laptops and tests.

Upstream assumes CUDA in three ways, and each has its remedy here: calls into torch.cuda and device="cuda" literals
(`proxy`, `devices`: megatron.core modules see a torch of their own), collectives that gloo lacks (`collectives`),
and single functions that are wrong without a GPU or TransformerEngine (`modules`). Every remedy is a named fix with
a regression test that fails without it. With CUDA present nothing is touched but what megatron-core gets wrong where
TransformerEngine is missing; with both, nothing at all.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

import torch

from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.megatron.cpu import collectives, devices, fused, groups, modules  # noqa: F401  (they register the fixes)
from mcore_rl.megatron.cpu.hook import MegatronFinder
from mcore_rl.megatron.cpu.registry import FIXES
from mcore_rl.resolved.installed import transformer_engine

SUPPORTED_VERSION = "0.16.1"

_installed = False
_mended = False


def install(*, without: Collection[str] = ()) -> bool:
    """Makes `import megatron.core` work on a machine without CUDA, or without TransformerEngine; idempotent. Call it
    before that import.

    `without` names fixes to leave out, for tests.

    Returns: whether the CPU backend is in place; False where CUDA is present.
    Raises: ConfigError when megatron-core is missing or of another version than the fixes were written for, or
        TransformerEngine, which megatron would import, cannot be;
        McoreRLError when megatron.core was imported before.
    """
    global _installed, _mended
    if _installed or _mended:
        return _installed
    on_cuda = torch.cuda.is_available()
    if on_cuda and transformer_engine(imported=True):
        return False
    unknown = set(without) - set(FIXES)
    assert not unknown, f"no fix is called {sorted(unknown)}"
    _check_version()
    early = sorted(name for name in sys.modules if name == "megatron.core" or name.startswith("megatron.core."))
    if early:
        raise McoreRLError(
            f"{early[0]} was imported before mcore_rl.megatron.cpu.install(): call install() first in the process, "
            "otherwise the CPU backend cannot reach modules that are already loaded"
        )
    fixes = [fix for fix in FIXES.values() if fix.name not in without and (fix.on_cuda or not on_cuda)]
    for fix in fixes:
        if fix.module is None:
            fix.apply(fix, None)
    sys.meta_path.insert(0, MegatronFinder(frozenset(fix.name for fix in fixes), rebinds=not on_cuda))
    _installed, _mended = not on_cuda, True
    return _installed


def _check_version() -> None:
    wanted = f"the CPU backend is written for megatron-core {SUPPORTED_VERSION}"
    try:
        installed = version("megatron-core")
    except PackageNotFoundError:
        raise ConfigError(f"megatron-core is not installed; {wanted}: pip install 'mcore-rl[cpu]'") from None
    if installed != SUPPORTED_VERSION:
        raise ConfigError(
            f"megatron-core {installed} is installed, but {wanted}: pip install megatron-core=={SUPPORTED_VERSION}"
        )
