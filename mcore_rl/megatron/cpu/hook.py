"""The import hook: runs after each megatron.core module's own code."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from mcore_rl.megatron.cpu.proxy import rebind
from mcore_rl.megatron.cpu.registry import FIXES

_PACKAGE = "megatron.core"


class _Loader(SourceFileLoader):
    """Executes a module as usual, then rebinds its torch, if it is to, and applies the fixes that name it."""

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
    """Finds megatron.core modules where they are, and loads them through _Loader, which applies `fixes` and, if it
    `rebinds`, gives each module a torch of its own."""

    def __init__(self, fixes: frozenset[str], *, rebinds: bool) -> None:
        self._fixes, self._rebinds = fixes, rebinds

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self._fixes, self._rebinds)
        return spec
