"""docs/upstream-faults.md names modules and tests that exist, and lists every named fix of the CPU backend."""

from __future__ import annotations

import ast
import re

import pytest

from mcore_rl.megatron.cpu import FIXES
from tests.readme import ROOT

PAGE = (ROOT / "docs" / "upstream-faults.md").read_text(encoding="utf-8")
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")[1:]}
UNTESTED = "Corrected without a test of its own"
TESTED_ROWS = [
    re.split(r"(?<!\\)\|", line)[1:-1]
    for title, text in SECTIONS.items()
    if title != UNTESTED
    for line in text.splitlines()
    if line.startswith("| ") and not line.startswith("| fault ")
]


def test_every_row_has_a_fault_an_effect_a_correction_and_a_test() -> None:
    assert len(TESTED_ROWS) > 50
    assert [row for row in TESTED_ROWS if len(row) != 4 or not all(cell.strip() for cell in row)] == []


def test_every_named_file_exists() -> None:
    files = re.findall(r"`((?:mcore_rl|model_converters|tests)/[\w/.]+)`", PAGE)
    assert len(files) > 100
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("row", TESTED_ROWS, ids=lambda row: row[0].strip()[:50])
def test_every_named_test_is_in_its_file(row: list[str]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`|`(test_\w+)`", row[3])
    tests = []
    for file, function in named:
        if file:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            known = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        else:
            assert function in known
            tests.append(function)
    assert tests


def test_every_named_function_is_in_a_module_of_its_row() -> None:
    """The correction cell has the form: `module` (`name`)."""
    found = re.findall(r"`((?:mcore_rl|model_converters)/[\w/]+\.py)` \(`(\w+)`\)", PAGE)
    assert len(found) > 30
    assert [(file, name) for file, name in found if not re.search(rf"\b{name}\b", (ROOT / file).read_text())] == []


def test_every_fix_of_the_cpu_backend_is_listed() -> None:
    listed = set(re.findall(r"`(\w+)`", SECTIONS["megatron-core: without TransformerEngine or CUDA"]))
    assert {name.partition(":")[0] for name in FIXES} <= listed
