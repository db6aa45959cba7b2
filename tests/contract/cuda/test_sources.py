"""The static analysis of sources accepts valid uses and finds each kind of mistake; all contracts depend on it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.contract.cuda.sources import Sources
from tests.contract.cuda.uses import keys_of, returned_keys, uses

LIBRARY = {
    "lib/__init__.py": """
        try:
            from lib.fast import norm
        except ImportError:
            norm = None
        from .shapes import *
        import torch
    """,
    "lib/fast.py": """
        from lib_kernels import gemm
        from lib._compiled import scale

        def norm(x, eps=1e-5, *, inplace=False): ...
        def compiled(*args, **kwargs): ...
        alias = norm
    """,
    "lib/shapes.py": """
        from dataclasses import dataclass
        from typing import overload
        import torch

        class Base:
            def __init__(self, size): self.size = size
            def area(self, scale): ...
            @staticmethod
            def count(kind): ...

        class Square(Base):
            kind: str
            @overload
            def area(self): ...
            def area(self, scale=1): ...

        class Layer(torch.nn.Module):
            def __init__(self, **options): ...

        @dataclass
        class Options:
            width: int
            height: int = 1
    """,
}


@pytest.fixture
def library(tmp_path: Path) -> Sources:
    for name, text in LIBRARY.items():
        write(tmp_path / name, text)
    return Sources(tmp_path)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.replace("\n        ", "\n"))
    return path


def refused(library: Sources, text: str, **instances: str) -> dict[str, str]:
    file = write(library.folder / "ours.py", text.strip())
    return {name: why.rpartition(" (")[0] for name, why in library.problems(uses(file, "lib", instances)).items()}


@pytest.mark.parametrize(
    "text",
    [
        "from lib import norm, Square, Options\nnorm(1, eps=2, inplace=True)\nSquare(3).area()\nOptions(width=1)",
        "import lib.fast as f\nf.norm(1)\nf.gemm(1, 2, 3)\nf.scale(4)\nf.alias(1)\nf.compiled(1, 2, three=3)",
        "import lib\nlib.Square.count('x')\nlib.shapes.Base.area\nlib.Layer(anything=1)",
        "from lib import Square\ndef f(s: Square): s.area(scale=1), s.size, s.kind, Square(size=1)",
        "from lib import Layer\ndef f(m: Layer): m.named_parameters()",
        "import torch\nfrom lib import Base\ndef f(x):\n    if isinstance(x, Base): x.area(1)\n    else: x.other()",
        "from lib import Base\nclass C(Base):\n    def g(self): super().area(2)",
        "from lib import norm\nnorm(*everything, **more)",
    ],
)
def test_problems_valid_use_is_empty(library: Sources, text: str) -> None:
    assert refused(library, text) == {}


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        ("from lib import nrom", "lib.nrom", "does not exist"),
        ("from lib.gone import norm", "lib.gone.norm", "does not exist"),
        ("import lib\nlib.fast.gone", "lib.fast.gone", "does not exist"),
        ("from lib import norm\nnorm(1, epsilon=2)", "lib.norm", "has no argument epsilon"),
        ("from lib import norm\nnorm(1, 2, 3)", "lib.norm", "takes 2 positional arguments, not 3"),
        ("from lib import norm\nnorm(eps=1)", "lib.norm", "needs x"),
        ("from lib.fast import alias\nalias(1, epsilon=2)", "lib.fast.alias", "has no argument epsilon"),
        ("from lib import Options\nOptions(height=2)", "lib.Options", "needs width"),
        ("from lib import Options\nOptions(width=1, depth=2)", "lib.Options", "has no argument depth"),
        ("from lib import Square\nSquare(1, 2)", "lib.Square", "takes 1 positional arguments, not 2"),
        ("from lib import Square\ndef f(s: Square): s.area(1, 2)", "lib.Square.area",
         "takes 1 positional arguments, not 2"),
        ("from lib import Square\ndef f(s: Square): s.volume", "lib.Square.volume", "does not exist"),
        ("from lib import Layer\ndef f(m: Layer): m.no_such_method()", "lib.Layer.no_such_method", "does not exist"),
        ("from lib import Base\ndef f(x):\n    if isinstance(x, Base): x.gone", "lib.Base.gone", "does not exist"),
        ("from lib import Base\nclass C(Base):\n    size: int\n    def g(self): super().area()", "lib.Base.area",
         "needs scale"),
        ("from lib import Base\nclass C:\n    base: Base\n    def g(self): self.base.gone", "lib.Base.gone",
         "does not exist"),
    ],
)  # fmt: skip
def test_problems_invalid_use_is_explained(library: Sources, text: str, name: str, why: str) -> None:
    assert refused(library, text) == {name: why}


def test_uses_declared_instance_is_followed(library: Sources) -> None:
    assert refused(library, "print(self._shape.area(1), self._shape.gone)", **{"self._shape": "lib.Base"}) == {
        "lib.Base.gone": "does not exist"
    }


def test_attributes_include_bases_and_instance_attributes(library: Sources) -> None:
    square = library.find("lib.Square")
    assert square is not None
    assert library.attributes(square) == {"__init__", "area", "count", "size"}


def test_keys_of_finds_literals_updates_and_items() -> None:
    text = "def f():\n a: dict = {'x': 1}\n a |= {'y': 2}\n a['z'] = 3\n a.update({'w': 4})\n b = {'v': 5}"
    assert set(keys_of(ast.parse(text), "a")) == {"x", "y", "z", "w"}


def test_returned_keys_finds_every_return_of_one_function() -> None:
    text = "def f():\n  if a:\n    return {'x': 1}\n  return {'y': 2, **z}\ndef g():\n  return {'w': 3}"
    assert set(returned_keys(ast.parse(text), "f")) == {"x", "y"}
    assert returned_keys(ast.parse(text), "h") == {}
