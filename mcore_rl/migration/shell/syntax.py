"""Syntax trees of shell scripts, parsed by tree-sitter-bash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from mcore_rl.errors import ConfigError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_ARITHMETIC_DEFAULT = re.compile(r"(\$\{\w+:?[-=+])\$\(\(([^\n\"]*?)\)\)\}")
EXPANSIONS = ("expansion", "simple_expansion", "arithmetic_expansion", "command_substitution")
MAX_CORRECTIONS = 20
"""Maximum number of passes that separate lines; a corrected line can show that the next one needs it too."""


def parse(script: str) -> Node:
    """Parse a script; the tree may contain ERROR nodes.

    Raises: ConfigError if tree-sitter is not installed.
    """
    # tree-sitter-bash 0.25 takes `$((` in the default of a variable for a command, unless it is quoted.
    source, parser = _ARITHMETIC_DEFAULT.sub(r'\1"$((\2))"}', script).encode(), _parser()
    tree = parser.parse(source)
    # tree-sitter-bash 0.25 takes `A=1 B=2`, newline, `command` for one command. A semicolon keeps the line numbers.
    for _ in range(MAX_CORRECTIONS):
        places = set(_merged_lines(tree.root_node, source))
        if not places:
            break
        for place in sorted(places, reverse=True):
            source = source[:place] + b";" + source[place:]
        tree = parser.parse(source)
    return tree.root_node


def text_of(node: Node) -> str:
    """Return the source of a node."""
    return (node.text or b"").decode(errors="replace")


def line_of(node: Node) -> int:
    """Return the line of a node's first character, from 1."""
    return int(node.start_point[0]) + 1


def pieces(node: Node) -> Iterator[Node | str]:
    """Yield the parts of a quoted text or here-document: child nodes, and the text between them, which the grammar
    gives no node if it is only blanks."""
    source, start = node.text or b"", node.start_byte
    place = start
    for child in node.children:
        # tree-sitter-bash 0.25 counts blanks before `$` in quotes as part of the expansion.
        blanks = len(child.text or b"") - len((child.text or b"").lstrip()) if child.type in EXPANSIONS else 0
        if child.start_byte + blanks > place:
            yield source[place - start : child.start_byte + blanks - start].decode(errors="replace")
        yield child
        place = child.end_byte
    if node.end_byte > place:
        yield source[place - start :].decode(errors="replace")


@cache
def _parser() -> Parser:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError:
        raise ConfigError(
            "reading a shell script needs tree-sitter and tree-sitter-bash: pip install 'mcore-rl[import]'"
        ) from None
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def _merged_lines(root: Node, source: bytes) -> Iterator[int]:
    """Yield the offsets of newlines that end a line of assignments inside a command."""
    pending = [root]
    while pending:
        node = pending.pop()
        pending += node.children
        if node.type not in ("command", "variable_assignments"):
            continue
        for before, after in zip(node.children, node.children[1:], strict=False):
            gap = source[before.end_byte : after.start_byte]
            if before.type == "variable_assignment" and b"\n" in gap and b"\\\n" not in gap:
                yield before.end_byte
