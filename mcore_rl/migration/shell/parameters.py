"""Parameter expansions: `$NAME`, `${NAME:-word}`, `${NAME##*/}`, `${NAME[@]}`, `${@:2}`, `$#`."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

from mcore_rl.migration.shell.arithmetic import integer
from mcore_rl.migration.shell.syntax import text_of
from mcore_rl.migration.shell.words import Word

if TYPE_CHECKING:
    from tree_sitter import Node

    from mcore_rl.migration.shell.expansion import Expander

NAME_NODES = ("variable_name", "special_variable_name")
MAX_TRIMMED = 10_000
"""Maximum length of a value of which a part is removed or replaced; a match is searched at every character."""
CASES = {
    ",,": str.lower,
    "^^": str.upper,
    ",": lambda text: text[:1].lower() + text[1:],
    "^": lambda text: text[:1].upper() + text[1:],
}


def items_of(node: Node, expander: Expander) -> tuple[str | None, list[Word] | None]:
    """Return the name of an expansion and, for a list such as `${NAME[@]}` or `$@`, its items.

    The items are None if the expansion is no list, and [] if the list is not set.
    """
    name = next((text_of(child) for child in node.named_children if child.type in NAME_NODES), None)
    subscript = next((child for child in node.named_children if child.type == "subscript"), None)
    variables = expander.variables
    if node.children[0].type == "${" and node.children[1].type in ("#", "!"):
        return name, None
    if name in ("@", "*"):
        return name, _sliced(variables.positional, node)
    if subscript is None:
        return name, None
    name, index = (text_of(child) for child in subscript.named_children[:2])
    if index in ("@", "*"):
        return name, _sliced(variables.items(name) or [], node)
    items = variables.items(name)
    if items is not None and re.fullmatch(r"-?\d{1,9}", index) and -len(items) <= int(index) < len(items):
        return name, [items[int(index)]]
    return name, None


def value_of(node: Node, expander: Expander) -> str | None:
    """Return the value of an expansion that is no list; None if the script does not determine it."""
    name = next((text_of(child) for child in node.named_children if child.type in NAME_NODES), None)
    subscript = next((child for child in node.named_children if child.type == "subscript"), None)
    if subscript is not None:
        return _length(subscript, expander) if any(child.type == "#" for child in node.children) else None
    if name is None or name == "#":
        return str(len(expander.variables.positional)) if name == "#" or _is_argument_count(node) else None
    if any(child.type == "#" for child in node.children[:2]):
        value = expander.variables.get(name)
        return None if value is None else str(len(value))
    sign = next((child for child in node.children if child.type not in (*NAME_NODES, "$", "${", "}")), None)
    return expander.variables.get(name) if sign is None else _changed(name, sign, expander)


def _changed(name: str, sign: Node, expander: Expander) -> str | None:
    """Apply the operator of `${NAME<operator>word}`."""
    variables, value = expander.variables, expander.variables.get(name)
    operand = sign.next_sibling
    if sign.type in (":-", "-", ":=", "="):
        if value is not None and (value or ":" not in sign.type):
            return value
        word = "" if operand is None or operand.type == "}" else expander.text(operand)
        if "=" in sign.type:
            variables.set(name, word)
        return word
    if sign.type in (":+", "+"):
        used = value is not None and (value or ":" not in sign.type)
        return expander.text(operand) if used and operand is not None and operand.type != "}" else ""
    if sign.type == ":?" and not value:
        # bash stops here; the user has to set the variable.
        variables.forget(name)
        return None
    if value is None or sign.type in (":?", "?"):
        return value
    if sign.type in CASES:
        return str(CASES[sign.type](value))
    pattern = "" if operand is None or operand.type == "}" else text_of(operand).strip("\"'")
    if sign.type in ("#", "##", "%", "%%"):
        return _trimmed(value, sign.type, pattern)
    if sign.type in ("/", "//"):
        return _replaced(value, sign, pattern, expander)
    return None


def _trimmed(value: str, sign: str, pattern: str) -> str:
    """Remove the shortest (one sign) or longest (two signs) prefix (#) or suffix (%) that matches."""
    if len(value) > MAX_TRIMMED:
        return value
    ends = range(len(value) + 1)
    parts = [(value[:end], value[end:]) if sign[0] == "#" else (value[end:], value[:end]) for end in ends]
    matching = [rest for part, rest in parts if fnmatch.fnmatchcase(part, pattern)]
    if not matching:
        return value
    return min(matching, key=len) if len(sign) == 2 else max(matching, key=len)


def _replaced(value: str, sign: Node, pattern: str, expander: Expander) -> str:
    """Replace the first match of a pattern (/) or all matches (//)."""
    if len(value) > MAX_TRIMMED:
        return value
    following = sign.next_sibling.next_sibling if sign.next_sibling is not None else None
    replacement = following.next_sibling if following is not None and following.type == "/" else None
    word = "" if replacement is None or replacement.type == "}" else expander.text(replacement)
    expression = fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")
    return re.sub(expression, lambda match: word, value, count=0 if sign.type == "//" else 1)


def _sliced(items: list[Word], node: Node) -> list[Word]:
    """Apply the range of `${NAME[@]:first:length}`."""
    numbers = [integer(text_of(child)) or 0 for child in node.named_children if child.type == "number"]
    colon = any(child.type == ":" for child in node.children)
    if not colon or not numbers:
        return items
    # $@ counts from 1.
    first = numbers[0] - (1 if any(child.type == "special_variable_name" for child in node.children) else 0)
    return items[max(first, 0) :][: numbers[1] if len(numbers) > 1 else None]


def _length(subscript: Node, expander: Expander) -> str | None:
    items = expander.variables.items(text_of(subscript.named_children[0]))
    return None if items is None else str(len(items))


def _is_argument_count(node: Node) -> bool:
    return text_of(node).strip() in ("$#", "${#}")
