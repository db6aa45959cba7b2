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
    """Executes a module as usual, then rebinds its torch and applies the fixes that name it."""

    def __init__(self, fullname: str, path: str, skipped: frozenset[str]) -> None:
        super().__init__(fullname, path)
        self._skipped = skipped

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        rebind(module)
        for fix in FIXES.values():
            if (
                fix.module is not None
                and module.__name__ == f"{_PACKAGE}.{fix.module}"
                and fix.name not in self._skipped
            ):
                fix.apply(fix, module)


class MegatronFinder(MetaPathFinder):
    """Finds megatron.core modules where they are, and loads them through _Loader."""

    def __init__(self, skipped: frozenset[str]) -> None:
        self._skipped = skipped

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self._skipped)
        return spec
