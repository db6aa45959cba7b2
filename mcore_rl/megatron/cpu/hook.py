"""Import hook that applies fixes to each megatron.core module after its code has run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from mcore_rl.megatron.cpu.proxy import rebind
from mcore_rl.megatron.cpu.registry import FIXES

_PACKAGE = "megatron.core"


class _Loader(SourceFileLoader):
    """Loader that executes a module, rebinds its torch if required, and applies the fixes of the module."""

    def __init__(self, fullname: str, path: str, fixes: frozenset[str], rebinds: bool) -> None:
        super().__init__(fullname, path)
        self._fixes, self._rebinds = fixes, rebinds

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if self._rebinds:
            rebind(module)
        for fix in FIXES.values():
            if fix.module is not None and module.__name__ == f"{_PACKAGE}.{fix.module}" and fix.name in self._fixes:
                fix.apply(fix, module)


class MegatronFinder(MetaPathFinder):
    """Finder that loads megatron.core modules with _Loader. fixes: names of fixes to apply. rebinds: replace torch in
    each module by its proxy."""

    def __init__(self, fixes: frozenset[str], *, rebinds: bool) -> None:
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
