"""Results of commands in `$( )` that only compute a text; every other output is unknown."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from mcore_rl.migration.shell.syntax import text_of
from mcore_rl.migration.shell.words import UNKNOWN

if TYPE_CHECKING:
    from tree_sitter import Node

    from mcore_rl.migration.shell.expansion import Expander

_OWN_DIRECTORY = re.compile(r"dirname\b.*(?:BASH_SOURCE|\$\{?0)")
_PARENTS = re.compile(r"(?:/\.\.)+(?=[\"'/)\s]|$)")
MAX_ITEMS = 10_000
"""Maximum number of items of seq."""


def substituted(node: Node, expander: Expander) -> str | None:
    """Return the output of a command substitution; None if it is unknown."""
    source = text_of(node)
    if _OWN_DIRECTORY.search(source):
        # The usual form is $(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd).
        parents = _PARENTS.search(source)
        return os.path.normpath(f"{expander.variables.directory}{parents[0] if parents else ''}")
    commands = [child for child in node.named_children if child.type != "comment"]
    if len(commands) != 1:
        return None
    if commands[0].type == "redirected_statement":
        return here_document(commands[0], expander)
    if commands[0].type != "command":
        return None
    words = [word.text for child in commands[0].named_children for word in expander.words(child)]
    if words[:1] == ["pwd"]:
        return "${PWD}"
    return None if any(map(UNKNOWN.search, words)) else _output(words)


def here_document(statement: Node, expander: Expander) -> str | None:
    """Return the here-document of `cat <<EOF`; None for another command or redirection."""
    body = next((child for child in statement.named_children if child.type == "command"), None)
    redirect = next((child for child in statement.named_children if child.type == "heredoc_redirect"), None)
    if body is None or redirect is None or text_of(body).split()[:1] != ["cat"]:
        return None
    return document_of(redirect, expander).removesuffix("\n")


def document_of(redirect: Node, expander: Expander) -> str:
    """Return the text of a here-document, expanded unless its delimiter is quoted."""
    start = next((text_of(child) for child in redirect.named_children if child.type == "heredoc_start"), "")
    body = next((child for child in redirect.named_children if child.type == "heredoc_body"), None)
    return "" if body is None else expander.document(body, raw=start[:1] in "\"'\\" and bool(start))


def _output(words: list[str]) -> str | None:
    match words:
        case ["echo", *rest]:
            return " ".join(rest[1:] if rest[:1] == ["-n"] else rest)
        case ["basename", path]:
            return os.path.basename(path.rstrip("/")) or "/"
        case ["basename", path, suffix]:
            return os.path.basename(path.rstrip("/")).removesuffix(suffix)
        case ["dirname", path]:
            return os.path.dirname(path.rstrip("/")) or "."
        case ["seq", *numbers] if 1 <= len(numbers) <= 3 and all(re.fullmatch(r"-?\d{1,9}", each) for each in numbers):
            values = [int(each) for each in numbers]
            first = values[0] if len(values) > 1 else 1
            step = values[1] if len(values) == 3 else 1
            if step == 0 or abs(values[-1] - first) // abs(step) > MAX_ITEMS:
                return None
            return "\n".join(map(str, range(first, values[-1] + (1 if step > 0 else -1), step)))
        case _:
            return None
