"""CPU backend: runs the unmodified megatron-core package on gloo, for laptops and tests.

megatron-core assumes CUDA in three ways:

- calls of torch.cuda and device="cuda" literals: megatron.core modules get a proxy of torch (`hook`, `devices`);
- collectives that gloo does not support (`gloo`);
- functions that fail without a GPU or TransformerEngine (`modules`).

Each is corrected by a named fix with a regression test that fails without it. With CUDA but without TransformerEngine,
only fixes for the missing TransformerEngine apply; with both, none.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

import torch

from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.megatron.cpu import devices, fused, gloo, modules  # noqa: F401  (register the fixes)
from mcore_rl.megatron.cpu.hook import MegatronFinder
from mcore_rl.megatron.cpu.registry import FIXES
from mcore_rl.resolved.installed import transformer_engine

SUPPORTED_VERSION = "0.16.1"

_installed: bool | None = None
"""Result of the first call of `install`."""


def install(*, without: Collection[str] = ()) -> bool:
    """Make `import megatron.core` work without CUDA or without TransformerEngine. Idempotent; must be called before the
    first import of megatron.core.

    without: names of fixes to leave out, for tests.

    Returns True if the CPU backend is installed, False with CUDA.
    Raises: ConfigError if megatron-core is missing or has another version than SUPPORTED_VERSION, or if an installed
        TransformerEngine cannot be imported; McoreRLError if megatron.core was imported before.
    """
    global _installed
    if _installed is not None:
        return _installed
    on_cuda = torch.cuda.is_available()
    if on_cuda and transformer_engine(imported=True):
        return False
    unknown = set(without) - set(FIXES)
    assert not unknown, f"unknown fixes: {sorted(unknown)}"
    _check_version()
    early = sorted(name for name in sys.modules if name == "megatron.core" or name.startswith("megatron.core."))
    if early:
        raise McoreRLError(
            f"{early[0]} was imported before mcore_rl.megatron.cpu.install(): call install() first, because the CPU "
            "backend cannot change modules that are already loaded"
        )
    # Fixes of a module are applied by the import hook when Megatron imports it; the others now.
    fixes = [fix for fix in FIXES.values() if fix.name not in without and (fix.on_cuda or not on_cuda)]
    for fix in fixes:
        if fix.module is None:
            fix.apply(fix, None)
    sys.meta_path.insert(0, MegatronFinder(fixes, rebinds=not on_cuda))
    _installed = not on_cuda
    return _installed


def _check_version() -> None:
    required = f"the CPU backend requires megatron-core {SUPPORTED_VERSION}"
    try:
        installed = version("megatron-core")
    except PackageNotFoundError:
        raise ConfigError(f"megatron-core is not installed; {required}: pip install 'mcore-rl[cpu]'") from None
    if installed != SUPPORTED_VERSION:
        raise ConfigError(
            f"megatron-core {installed} is installed, but {required}: pip install megatron-core=={SUPPORTED_VERSION}"
        )
