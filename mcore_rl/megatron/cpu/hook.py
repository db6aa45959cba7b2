"""Import hook for megatron.core modules: after a module's code has run, it replaces torch in the module by a proxy,
and applies the module's fixes. Optional packages that ranks do not use are not imported with Megatron.

The proxy is torch with a few names replaced. Replacing the names in torch itself would affect torch._dynamo, Ray and
transformers, and `torch.manual_seed`, which calls `torch.cuda.manual_seed_all`, would recurse.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

import torch
import torch.distributed

from mcore_rl.megatron.cpu.registry import Fix

_PACKAGE = "megatron.core"
_UNUSED = "wandb"
"""Package that megatron.core (0.16.1) imports for the metrics of its own inference engine, and replaces by None if it
is not installed. Its import takes a tenth of the CPU time of a rank's start. The driver's tracker imports it itself."""


class NamespaceProxy(ModuleType):
    """Module whose own attributes take precedence over the attributes of the real module."""

    cuda: ModuleType
    distributed: ModuleType

    def __init__(self, real: ModuleType) -> None:
        super().__init__(real.__name__)
        self.__dict__["real"] = real

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["real"], name)


TORCH = NamespaceProxy(torch)
CUDA = NamespaceProxy(torch.cuda)
DISTRIBUTED = NamespaceProxy(torch.distributed)
TORCH.cuda = CUDA
TORCH.distributed = DISTRIBUTED

_PROXIES = {id(proxy.__dict__["real"]): proxy for proxy in (TORCH, CUDA, DISTRIBUTED)}


def rebind(module: ModuleType) -> None:
    """Replace globals of `module` that are torch, torch.cuda or torch.distributed by their proxies."""
    for name, value in list(vars(module).items()):
        proxy = _PROXIES.get(id(value))
        if proxy is not None:
            setattr(module, name, proxy)


@contextlib.contextmanager
def _without_unused() -> Iterator[None]:
    """Let imports of _UNUSED fail in the block, unless it is imported already or an outer block does so."""
    if _UNUSED in sys.modules:
        yield
        return
    sys.modules[_UNUSED] = None  # type: ignore[assignment]  # documented: makes imports raise ModuleNotFoundError
    try:
        yield
    finally:
        del sys.modules[_UNUSED]


class _Loader(SourceFileLoader):
    """Loader that executes a module, rebinds its torch if required, and applies the fixes of the module."""

    def __init__(self, fullname: str, path: str, fixes: Sequence[Fix], rebinds: bool) -> None:
        super().__init__(fullname, path)
        self._fixes, self._rebinds = fixes, rebinds

    def exec_module(self, module: ModuleType) -> None:
        with _without_unused():
            super().exec_module(module)
        if self._rebinds:
            rebind(module)
        for fix in self._fixes:
            if module.__name__ == f"{_PACKAGE}.{fix.module}":
                fix.apply(fix, module)


class MegatronFinder(MetaPathFinder):
    """Finder that loads megatron.core modules with _Loader, which applies `fixes`. With `rebinds` it replaces torch in
    each module by its proxy."""

    def __init__(self, fixes: Sequence[Fix], *, rebinds: bool) -> None:
        self._fixes, self._rebinds = fixes, rebinds

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        # Find the module as usual; only its loader is replaced.
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self._fixes, self._rebinds)
        return spec
