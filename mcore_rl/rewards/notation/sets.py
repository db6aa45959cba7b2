r"""Evaluation of operations on finite sets: `\{1,2\}\cup\{3\}` is `\{1, 2, 3\}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

EMPTY = r"\emptyset"
MAX_ELEMENTS = 12

_OPERATOR = re.compile(r"\\(cup|cap|setminus|backslash)(?![A-Za-z])")
_EMPTY_OPERAND = re.compile(r"\\emptyset\s*")
_BRACES = re.compile(r"\s*\\\{((?:[^{}\\]|\\[A-Za-z]+|\\[,;! ]|\{[^{}]*\})*)\\\}\s*")

Equal = Callable[[str, str], bool]


def finite_set(text: str, elements: Callable[[str], list[str]], equal: Equal) -> str:
    r"""Evaluate operations on finite sets to a set `\{a, b\}`; return any other text unchanged.

    Text with two different operators is unchanged too, because their precedence is not standardized.
    """
    parts = _OPERATOR.split(text)  # operands and operators in turn
    operands, operators = parts[::2], set(parts[1::2])
    if len(operators) != 1 or len(operands) > MAX_ELEMENTS:
        return text
    sets = [_members(operand, elements) for operand in operands]
    known = [members for members in sets if members is not None]
    if len(known) < len(sets) or max(map(len, known)) > MAX_ELEMENTS:
        return text
    result = known[0]
    for other in known[1:]:
        result = _combined(parts[1], result, other, equal)
    members = _distinct(result, equal)
    return rf"\{{{', '.join(members)}\}}" if members else EMPTY


def _members(operand: str, elements: Callable[[str], list[str]]) -> list[str] | None:
    if _EMPTY_OPERAND.fullmatch(operand.strip()):
        return []
    braces = _BRACES.fullmatch(operand)
    return elements(operand.strip()) if braces else None


def _combined(operator: str, one: Sequence[str], other: Sequence[str], equal: Equal) -> list[str]:
    if operator == "cup":
        return [*one, *other]
    shared = operator == "cap"
    return [member for member in one if any(equal(member, each) for each in other) == shared]


def _distinct(members: Sequence[str], equal: Equal) -> list[str]:
    kept: list[str] = []
    for member in members:
        if not any(equal(member, each) for each in kept):
            kept.append(member)
    return kept
