"""Integer arithmetic of `$(( ))` and `(( ))`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

from mcore_rl.migration.shell.syntax import text_of

if TYPE_CHECKING:
    from tree_sitter import Node

BITS = 64
"""Size of the shell's integers; larger results wrap around."""


def _divide(a: int, b: int) -> int:
    # The shell rounds towards 0.
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


BINARY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": lambda a, b: a - b * _divide(a, b),
    "**": lambda a, b: pow(a, b, 2**BITS) if b >= 0 else 0,
    "<<": lambda a, b: a << b if 0 <= b < BITS else 0,
    ">>": lambda a, b: a >> b if 0 <= b < BITS else 0,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&&": lambda a, b: bool(a) and bool(b),
    "||": lambda a, b: bool(a) or bool(b),
}
UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "!": operator.not_,
    "~": operator.invert,
}


def evaluate(node: Node, lookup: Callable[[Node], str | None]) -> int | None:
    """Evaluate an expression; None if it depends on an unknown value or has an operator that is not supported.

    lookup: returns the text of a variable or expansion, or None if it is unknown.
    """
    match node.type:
        case "arithmetic_expansion" | "parenthesized_expression" | "compound_statement":
            inner = node.named_children
            return evaluate(inner[0], lookup) if len(inner) == 1 else None
        case "number":
            return integer(text_of(node))
        case "binary_expression":
            return _binary(node, lookup)
        case "unary_expression":
            value = evaluate(node.children[-1], lookup)
            function = UNARY.get(node.children[0].type)
            return None if value is None or function is None else _wrapped(int(function(value)))
        case "ternary_expression":
            condition, chosen, other = node.named_children
            value = evaluate(condition, lookup)
            return None if value is None else evaluate(chosen if value else other, lookup)
        case "variable_name" | "word" | "simple_expansion" | "expansion" | "string" | "command_substitution":
            text = lookup(node)
            return None if text is None else integer(text)
        case _:
            return None


def integer(text: str) -> int | None:
    """Read an integer as the shell does: decimal, 0x..., or octal with a leading 0; an empty text is 0."""
    digits = text.strip()
    if not digits:
        return 0
    unsigned = digits.lstrip("+-")
    octal = len(unsigned) > 1 and unsigned.startswith("0") and unsigned.isdigit()
    try:
        return _wrapped(int(digits, 8 if octal else 0))
    except ValueError:
        return None


def _binary(node: Node, lookup: Callable[[Node], str | None]) -> int | None:
    if len(node.children) != 3:
        return None
    left, sign, right = node.children
    a, b = evaluate(left, lookup), evaluate(right, lookup)
    function = BINARY.get(sign.type)
    if a is None or b is None or function is None or (sign.type in ("/", "%") and b == 0):
        return None
    return _wrapped(int(function(a, b)))


def _wrapped(value: int) -> int:
    return (value + 2 ** (BITS - 1)) % 2**BITS - 2 ** (BITS - 1)
