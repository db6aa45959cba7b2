"""Bundling of the scripts that run inside the sandbox into single sources that need only the standard library."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_PACKAGE = __name__.rpartition(".")[0]
_NEEDED = {
    "script": ("prelude",),
    "call": ("wire", "prelude"),
    "candidate": ("wire", "peer", "prelude"),
    "tester": ("wire", "peer", "prelude", "names", "suite"),
}
_LOADER = """import sys, types

def _define(name, text):
    parts = name.split(".")
    for depth in range(1, len(parts)):
        parent = types.ModuleType(".".join(parts[:depth]))
        parent.__path__ = []
        sys.modules.setdefault(parent.__name__, parent)
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, parts[-1] + ".py", "exec"), module.__dict__)
    return module

"""


@cache  # read the files once per process, not once per response
def _definitions(script: str) -> str:
    names = (*_NEEDED[script], script)
    texts = {name: Path(__file__).with_name(f"{name}.py").read_text() for name in names}
    lines = [f"_module = _define({f'{_PACKAGE}.{name}'!r}, {text!r})" for name, text in texts.items()]
    return _LOADER + "\n".join(lines)


def bundle(script: str, *arguments: str) -> str:
    """Return the source of a script that calls its main() with `arguments`."""
    return f"{_definitions(script)}\n_module.main({', '.join(map(repr, arguments))})\n"
