"""Patterns of unclear docstrings (AGENTS.md) that a script can find."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("mcore_rl", "model_converters", "scripts", "benchmarks")

MAX_TEST_NAME = 70

PATTERNS = {
    "starts with Of": (r"\A[Oo]f\b", 0.0),
    "starts with As": (r"\AAs\b", 0.0),
    "starts with a question word": (r"\A(What|Which|Whether|Where|Who|Whoever|Whose|How|When|Those|That)\b", 1.5),
    "starts with a preposition": (
        r"\A(In|On|By|After|Before|Within|From|With|Without|Between|Since|For|Under|Beside|To|Until)\b",
        0.5,
    ),
    "that of, those of": (r"\b(that|those) of\b|\bthe one that\b|\bhangs on\b", 0.3),
    "processes that speak": (r"\b(says|said|say|tells|told|tell|hears|heard|hear)\b", 0.3),
}
"""Pattern and the number of docstrings per 100 that may match."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of docstrings: of modules, classes and functions, and of assignments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for index, item in enumerate(body if isinstance(body, list) else []):
            match item:
                case ast.Expr(ast.Constant(str(text))):
                    if index == 0 or isinstance(body[index - 1], (ast.Assign, ast.AnnAssign)):
                        yield item.lineno, " ".join(text.split())


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Docstrings of the product by place."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {f"{path.relative_to(ROOT)}:{line}": text for path in paths for line, text in docstrings(path)}


@pytest.mark.parametrize("name", PATTERNS)
def test_docstrings_match_unclear_pattern_rarely(name: str, texts: dict[str, str]) -> None:
    pattern, limit = PATTERNS[name]
    found = {place: text[:80] for place, text in texts.items() if re.search(pattern, text)}
    assert 100 * len(found) / len(texts) <= limit, found


def test_names_of_tests_are_short() -> None:
    names = [
        node.name
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name) > MAX_TEST_NAME] == []
