"""docs/errors.md quotes messages that exist in the source code, and explains every type of error."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from mcore_rl import errors
from tests.readme import ROOT

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
ROWS = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
VARIES = "…"
MIN_LETTERS = 4
"""Letters that a quoted message needs; a shorter one would match anything."""
OF_OTHER_CALLS = {
    "RunDirLostError": f"{VARIES} was deleted or replaced while this run was using it",
    "StorageError": f"check the address, the network and the credentials, or set {VARIES} to a local path",
}
"""Types whose message is composed before the call that raises them, with a message on the page."""
GENERAL = {"McoreRLError", "ConfigError", "DataError"}
"""Types with too many messages to list."""


def template(node: ast.AST) -> str | None:
    """Return the text of a string or f-string with VARIES for each value; None for other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        text = "".join(VARIES if (part := template(value)) is None else part for value in node.values)
        return re.sub(f"{VARIES}+", VARIES, text)
    return None


@cache
def trees() -> list[ast.Module]:
    files = [path for package in ("mcore_rl", "model_converters") for path in (ROOT / package).rglob("*.py")]
    return [ast.parse(path.read_text(encoding="utf-8")) for path in files]


@cache
def templates() -> str:
    """All texts of the source code except docstrings, one per line."""
    nodes = [node for tree in trees() for node in ast.walk(tree)]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return "\n".join(text for node in nodes if id(node) not in docstrings and (text := template(node)))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip(" `")[:50])
def test_quoted_message_is_in_the_source(row: list[str]) -> None:
    assert len(row) == 3, "write three cells"
    assert all(cell.strip() for cell in row)
    (message,) = re.findall(r"`([^`]+)`", row[0])
    assert sum(map(str.isalpha, message)) >= MIN_LETTERS
    assert message in templates()


def test_quoted_message_with_another_word_is_not_in_the_source() -> None:
    """The check compares whole texts, so that a reworded message is noticed."""
    message = f"run.dir={VARIES} is in use by {VARIES}; wait until it ends"
    assert message in templates()
    assert message.replace("wait until", "wait till") not in templates()
    assert message.replace(f"by {VARIES}", "by process") not in templates()


def test_every_type_of_error_has_a_message_on_the_page() -> None:
    types = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    quoted = re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE)
    explained = {
        name
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func).rpartition(".")[2]) in types
        for text in [template(part) for argument in node.args for part in ast.walk(argument)]
        if text and any(message in text for message in quoted)
    }
    assert set(OF_OTHER_CALLS.values()) <= set(quoted)
    assert types - explained - set(OF_OTHER_CALLS) - GENERAL == set()
