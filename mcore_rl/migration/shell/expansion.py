"""Expansion of words: variables with defaults, arrays, arithmetic, quotes. No command is run; substitution.py computes
the output of a few commands without effects."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mcore_rl.migration.shell import parameters
from mcore_rl.migration.shell.arithmetic import evaluate
from mcore_rl.migration.shell.substitution import substituted
from mcore_rl.migration.shell.syntax import EXPANSIONS, line_of, pieces, text_of
from mcore_rl.migration.shell.words import UNKNOWN, Variables, Word

if TYPE_CHECKING:
    from tree_sitter import Node

_DOUBLE_QUOTED = re.compile(r"\\(\n|[$`\"\\])")
_HERE_DOCUMENT = re.compile(r"\\(\n|[$`\\])")
_UNQUOTED = re.compile(r"\\(.)", re.DOTALL)
_UNQUOTED_WORDS = re.compile(r"(?:\$\([^)]*\)|\S)+")
LISTS = ("@", "*")
KEPT = ("HOME", "PWD", "USER", "HOSTNAME")
"""Variables that every environment has."""
NODE_INDICES = ("RANK", "SLURM_PROCID", "SLURM_NODEID")
"""Endings of variables with the index of a node or process."""


class _Fields:
    """Words under construction: unquoted text is split at blanks, array items are words of their own."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.words: list[Word] = []
        self.current: str | None = None

    def add(self, text: str) -> None:
        self.current = (self.current or "") + text

    def add_split(self, text: str) -> None:
        """Add text whose blanks separate words; blanks inside the source of a command do not."""
        parts = _UNQUOTED_WORDS.findall(text)
        if text[:1].isspace():
            self.end()
        for number, part in enumerate(parts):
            if number:
                self.end()
            self.add(part)
        if parts and text[-1:].isspace():
            self.end()

    def add_items(self, items: Iterable[Word], *, quoted: bool) -> None:
        """Add the items of an array: the first continues the current word. Without quotes, blanks split items."""
        for number, item in enumerate(items):
            if number:
                self.end()
            self.line = item.line or self.line
            (self.add if quoted else self.add_split)(item.text)

    def end(self) -> None:
        if self.current is not None:
            self.words.append(Word(self.current, self.line))
        self.current = None


class Expander:
    """Expands the nodes of words with the variables of a script."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables

    def words(self, node: Node) -> list[Word]:
        """Expand a node to words: none for an empty array or an unset unquoted argument list, several for an array."""
        fields = _Fields(line_of(node))
        self._add(node, fields)
        fields.end()
        return fields.words

    def text(self, node: Node) -> str:
        """Expand a node to one text, as in an assignment."""
        fields = _Fields(line_of(node))
        self._add(node, fields, quoted=True)
        fields.end()
        return " ".join(word.text for word in fields.words)

    def document(self, node: Node, *, raw: bool) -> str:
        """Return the text of a here-document's body; raw: without expansion."""
        if raw:
            return text_of(node)
        parts = [
            _HERE_DOCUMENT.sub(_unescaped, part if isinstance(part, str) else text_of(part))
            if isinstance(part, str) or part.type == "heredoc_content"
            else self.text(part)
            for part in pieces(node)
        ]
        return "".join(parts)

    def known(self, node: Node) -> str | None:
        """Expand a node to one text; None if a part is unknown. A variable that is not set is empty."""
        text = self.text(node)
        if not UNKNOWN.search(text):
            return text
        # Conditions such as [ -n "$NAME" ] ask if a variable is set in the environment.
        found = UNKNOWN.sub(lambda part: part[0] if part[2] is not None or part[1] in KEPT else _unset(part[1]), text)
        return None if UNKNOWN.search(found) else found

    def _add(self, node: Node, fields: _Fields, *, quoted: bool = False) -> None:
        match node.type:
            case "concatenation":
                for child in node.children:
                    self._add(child, fields, quoted=quoted)
            case "string" | "translated_string":
                self._add_string(node, fields)
            case "raw_string":
                fields.add(text_of(node)[1:-1])
            case "ansi_c_string":
                fields.add(_ansi_c(text_of(node)))
            case "simple_expansion" | "expansion":
                self._add_expansion(node, fields, quoted=quoted)
            case "arithmetic_expansion":
                value = evaluate(node, self.known_variable)
                fields.add(text_of(node) if value is None else str(value))
            case "command_substitution":
                text = substituted(node, self)
                (fields.add if quoted else fields.add_split)(f"$({text_of(node)[2:-1]})" if text is None else text)
            case _:
                fields.add(_UNQUOTED.sub(_unescaped, text_of(node)))

    def _add_string(self, node: Node, fields: _Fields) -> None:
        parts = [part for part in pieces(node) if isinstance(part, str) or part.type != '"']
        if len(parts) == 1 and not isinstance(parts[0], str) and parts[0].type in EXPANSIONS[:2]:
            _, items = parameters.items_of(parts[0], self)
            if items is not None:  # "${NAME[@]}" of an empty array is no word
                fields.add_items(items, quoted=True)
                return
        fields.add("")  # an empty text in quotes is a word
        for part in parts:
            if isinstance(part, str):
                fields.add(_DOUBLE_QUOTED.sub(_unescaped, part))
            elif part.type == "string_content":
                fields.add(_DOUBLE_QUOTED.sub(_unescaped, text_of(part)))
            else:
                self._add(part, fields, quoted=True)

    def _add_expansion(self, node: Node, fields: _Fields, *, quoted: bool) -> None:
        name, items = parameters.items_of(node, self)
        if items is not None:
            fields.add_items(items, quoted=quoted)
            return
        if name in LISTS:
            return
        value = parameters.value_of(node, self)
        if value is None:
            fields.add(_unknown(text_of(node).strip(), name))
        elif quoted:
            fields.add(value)
        else:
            fields.add_split(value)

    def known_variable(self, node: Node) -> str | None:
        """Return the text of a variable in arithmetic; None if it is unknown."""
        is_name = node.type in ("variable_name", "word")
        text = self.variables.get(text_of(node)) if is_name else self.text(node)
        return None if text is None or UNKNOWN.search(text) else text


def _unknown(source: str, name: str | None) -> str:
    """Return the text of an expansion whose variable is not set: `${NAME}`, or `$(source)` if it changes the value."""
    plain = name is not None and (source in (f"${name}", f"${{{name}}}") or "?" in source)
    return f"${{{name}}}" if plain else f"$({source})"


def _unset(name: str) -> str:
    """Return the value of an unset variable in a condition: 0 for the index of a node, since the first node starts the
    training, and else an empty text."""
    return "0" if name.endswith(NODE_INDICES) else ""


def _unescaped(match: re.Match[str]) -> str:
    return "" if match[1] == "\n" else match[1]


def _ansi_c(source: str) -> str:
    """Return the text of $'...', which has the escapes of Python's strings."""
    try:
        return str(ast.literal_eval(source[1:]))
    except (SyntaxError, ValueError):
        return source[2:-1]
