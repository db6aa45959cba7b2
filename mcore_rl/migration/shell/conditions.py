"""Conditions: `[ ]`, `[[ ]]`, `test`, `(( ))`, and their combinations."""

from __future__ import annotations

import fnmatch
import os
import re
from typing import TYPE_CHECKING

from mcore_rl.migration.shell.arithmetic import evaluate, integer
from mcore_rl.migration.shell.substitution import ABSENT
from mcore_rl.migration.shell.syntax import text_of

if TYPE_CHECKING:
    from tree_sitter import Node

    from mcore_rl.migration.shell.expansion import Expander

COMPARISONS = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
FILES = {"-f": os.path.isfile, "-d": os.path.isdir, "-e": os.path.exists, "-s": os.path.exists, "-r": os.path.exists}


def holds(node: Node, expander: Expander) -> bool | None:
    """Evaluate a condition; None if the script does not determine it."""
    match node.type:
        case "test_command":
            inner = node.named_children
            if len(inner) == 1 and text_of(node).startswith("(("):
                value = evaluate(inner[0], expander.known_variable)
                return None if value is None else bool(value)
            return holds(inner[0], expander) if len(inner) == 1 else None
        case "compound_statement" if text_of(node).startswith("(("):
            value = evaluate(node, expander.known_variable)
            return None if value is None else bool(value)
        case "negated_command":
            value = holds(node.named_children[-1], expander)
            return None if value is None else not value
        case "parenthesized_expression" | "subshell" | "compound_statement" | "redirected_statement":
            return holds(node.named_children[0], expander) if node.named_children else None
        case "list" | "binary_expression" if len(node.children) == 3:
            return _binary(node, expander)
        case "unary_expression":
            return _unary(node, expander)
        case "command":
            return _command(node, expander)
        case "string" | "word" | "simple_expansion" | "expansion" | "concatenation" | "raw_string":
            text = expander.known(node)
            return None if text is None else bool(text)
        case _:
            return None


def _binary(node: Node, expander: Expander) -> bool | None:
    left, sign, right = node.children
    name = text_of(sign)
    if name in ("&&", "||", "-a", "-o"):
        a, b = holds(left, expander), holds(right, expander)
        decisive = name in ("||", "-o")
        if a is decisive or b is decisive:
            return decisive
        return None if a is None or b is None else not decisive
    a_text, b_text = expander.known(left), expander.known(right)
    if a_text is None or b_text is None:
        return None
    return _compare(a_text, name, b_text, quoted=right.type in ("string", "raw_string"))


def _compare(a: str, sign: str, b: str, *, quoted: bool) -> bool | None:
    if sign in ("=", "==", "!="):
        equal = a == b if quoted else fnmatch.fnmatchcase(a, b)
        return equal == (sign != "!=")
    if sign in COMPARISONS:
        numbers = integer(a), integer(b)
        return None if None in numbers else COMPARISONS[sign](*numbers)
    if sign == "=~":
        return _matches(a, b)
    if sign in ("<", ">"):
        return a < b if sign == "<" else a > b
    return None


def _matches(text: str, pattern: str) -> bool | None:
    """Search for a regular expression; None if it is not one, or could take long."""
    if len(re.findall(r"[*+{]", pattern)) > 1:
        return None
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return None


def _unary(node: Node, expander: Expander) -> bool | None:
    sign, operand = text_of(node.children[0]), node.children[-1]
    if sign == "!":
        value = holds(operand, expander)
        return None if value is None else not value
    text = expander.known(operand)
    if sign == "-v":
        return expander.variables.get(text_of(operand)) is not None
    if text is None:
        return None
    return _holds_for(sign, text)


def _holds_for(sign: str, text: str) -> bool | None:
    if sign in ("-n", "-z"):
        return bool(text) == (sign == "-n")
    if sign in FILES:
        # The script may be meant for another machine, where the file exists.
        return True if FILES[sign](text) else None
    return None


def _command(node: Node, expander: Expander) -> bool | None:
    if ABSENT.search(text_of(node)):
        return False
    words = [word.text for child in node.named_children for word in expander.words(child)]
    match words:
        case ["true" | ":"]:
            return True
        case ["false"]:
            return False
        case ["test", "-n" | "-z" as sign, text]:
            return _holds_for(sign, text)
        case ["test", a, sign, b]:
            return _compare(a, sign, b, quoted=True)
        case _:
            return None
