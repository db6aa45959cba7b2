"""Results of commands in `$( )` that only compute a text; every other output is unknown."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from mcore_rl.migration.shell.syntax import text_of
from mcore_rl.migration.shell.words import UNKNOWN

if TYPE_CHECKING:
    from tree_sitter import Node

    from mcore_rl.migration.shell.expansion import Expander

_OWN_DIRECTORY = re.compile(r"dirname\b.*(?:BASH_SOURCE|\$\{?0)")
_PARENTS = re.compile(r"(?:/\.\.)+(?=[\"'/)\s]|$)")
MAX_ITEMS = 10_000
"""Maximum number of items of seq."""
ABSENT = re.compile(r"\b(?:torch_npu|npu-smi|torch_musa)\b")
"""Programs and modules that scripts search for to detect accelerators that this project does not run on."""


class _Result(NamedTuple):
    """Outcome of a command: success and output, None if unknown, and the directory after it."""

    succeeded: bool | None
    output: str | None
    directory: str


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
    if commands[0].type == "redirected_statement" and (text := here_document(commands[0], expander)) is not None:
        return text
    return _result(commands[0], expander, "${PWD}").output


def _result(node: Node, expander: Expander, directory: str) -> _Result:
    """Compute a command, or a list such as `cd DIR && pwd` and `PROBE && echo A || echo B`."""
    if node.type == "list" and len(node.children) == 3:
        left, sign, right = node.children
        first = _result(left, expander, directory)
        if first.succeeded is None or first.output is None or first.succeeded is (sign.type == "||"):
            return first
        second = _result(right, expander, first.directory)
        output = None if second.output is None else first.output + second.output
        return _Result(second.succeeded, output, second.directory)
    if node.type == "redirected_statement" and node.named_children[0].type == "command":
        result = _result(node.named_children[0], expander, directory)
        redirects = [text_of(child) for child in node.named_children[1:]]
        discarded = any(redirect.startswith((">", "1>", "&>")) for redirect in redirects)
        return result._replace(output="") if discarded and result.succeeded is not None else result
    if node.type == "command" and ABSENT.search(text_of(node)):
        return _Result(False, "", directory)
    if node.type != "command":
        return _Result(None, None, directory)
    return _command_result([word.text for child in node.named_children for word in expander.words(child)], directory)


def _command_result(words: list[str], directory: str) -> _Result:
    if words[:1] == ["pwd"]:
        return _Result(True, directory, directory)
    if words in (["true"], ["false"]):
        return _Result(words == ["true"], "", directory)
    known = not any(map(UNKNOWN.search, words))
    if known and words[:1] == ["cd"] and len(words) > 1 and os.path.isabs(words[-1]):
        return _Result(True, "", os.path.normpath(words[-1]))
    output = _output(words) if known else None
    return _Result(None if output is None else True, output, directory)


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
