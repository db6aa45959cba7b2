r"""Normalization of answers: one spelling for each symbol, such as `\cup` for `∪` and `^{2}` for `**2`.

Delimiters, LaTeX spacing and fonts, currency signs, quotes, and full stops are removed.
"""

from __future__ import annotations

import re

from mcore_rl.rewards.notation.clock import plain_colons
from mcore_rl.rewards.notation.units import split_unit
from mcore_rl.rewards.numbers import expand_repeating, join_groups

MAX_CHARS = 400
"""Longer answers are compared without normalization."""

_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|\\quad|\\qquad|~|\s+")
_WRAPPERS = [
    pair.split() for pair in (r"\( \)", r"\[ \]", "$$ $$", "$ $", "** **", '" "', "\u201c \u201d", "` `", r"\boxed{ }")
]
_TEXT = re.compile(r"\\(?:text|textrm|mathrm|textbf|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_WHOLE_TEXT = re.compile(r"^\\(?:text|textrm|mathrm)\s*\{([^{}]*[0-9][^{}]*)\}$")
_BLACKBOARD = {"\u211d": "R", "\u2124": "Z", "\u211a": "Q", "\u2115": "N", "\u2102": "C"}
_REWRITES = (
    (re.compile(r"(?<=[0-9A-Za-z)}])\*\*([-+]?[0-9]+)"), r"^{\1}"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\bigcup(?![A-Za-z]|\s*[_^])|\u222a"), r"\\cup "),
    (re.compile(r"\\bigcap(?![A-Za-z]|\s*[_^])|\u2229"), r"\\cap "),
    (re.compile(r"\\(?:backslash|smallsetminus)(?![A-Za-z])|\u2216"), r"\\setminus "),
    (re.compile(r"\u221e"), r"\\infty "),
    (re.compile(r"\u2208"), r"\\in "),
    (re.compile(r"\\mathbb\s*([A-Z])(?![A-Za-z])"), r"\\mathbb{\1}"),
    (re.compile(r"\\([RZQN])(?![A-Za-z])"), r"\\mathbb{\1}"),
    (re.compile(f"[{''.join(_BLACKBOARD)}]"), lambda match: rf"\mathbb{{{_BLACKBOARD[match.group()]}}}"),
    (re.compile(r"\{([^{}\\]{1,40})\\choose(?![A-Za-z])([^{}]{1,40})\}"), r"\\binom{\1}{\2}"),
    # set difference written with a minus sign: \{1,2\} - \{2\}
    (re.compile(r"(?<=[A-Z\\]\})\s*-\s*(?=\\\{)"), r"\\setminus "),
    (re.compile(r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}|\u2205"), r"\\emptyset "),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(?:left|right)(?![a-z])"), ""),
    (re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\u00b0"), ""),
    (re.compile(r"(?<=[0-9])\{,\}(?=[0-9])"), ","),
    (re.compile(r"\\?[$]|[\u20ac\u00a3]|\u2009|\u202f|\u00a0"), ""),
    (re.compile("\u2212"), "-"),
    (re.compile(r"_\{\s*(\w)\s*\}"), r"_\1"),
    (re.compile(r"(?<=[0-9])\s*percent\b"), r"\\%"),
)
_AND = re.compile(r"\s*,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*")
_COMMANDS_AND_ANDS = re.compile(r"\\[A-Za-z]+|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_ASSIGNMENT = re.compile(r"^([A-Za-z](?:_\{?\w\}?)?)\s*=\s*(?=[^=])")
_ANY_ASSIGNMENT = re.compile(r"(?:^|,)\s*([A-Za-z](?:_\{?\w\}?)?)\s*=(?!=)")
# a set written as x\in\{1, 2\}
_MEMBER = re.compile(r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*(?=\S)")
_CHOICE = re.compile(r"\(([A-Z])\)")
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")


def normalise(answer: str) -> tuple[str, str]:
    """Return the normalized answer without its unit, and the unit (notation.units.split_unit)."""
    text = _unwrapped(expand_repeating(answer) if len(answer) <= MAX_CHARS else answer)
    if len(text) > MAX_CHARS or text.isdecimal():
        return text, ""
    text = plain_colons(join_groups(text))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text, unit = split_unit(_SPACING.sub(" ", text).strip())
    text = _SPACING.sub(" ", _TEXT.sub(r"\1", text)).strip().rstrip(".,;:").strip()
    # In an answer with other words, "and" is one of the words and does not separate elements.
    if not re.search(r"[A-Za-z]{2,}", _COMMANDS_AND_ANDS.sub("", text)):
        text = _AND.sub(", ", text)
    # x = 1 is 1, but x = 1, y = 2 keeps its names.
    if len(set(_ANY_ASSIGNMENT.findall(text))) == 1:
        text = _ASSIGNMENT.sub("", text)
    return _CHOICE.sub(r"\1", _MEMBER.sub("", text)), unit


def elements(text: str) -> list[str]:
    r"""Split an unordered list (`1, 2`, `\{1, 2\}`, or `1 \pm x`) into its elements; other text is one element."""
    if text.startswith("\\{") and text.endswith("\\}") and text.count("\\{") == 1:
        text = text[2:-2]
    elif text.startswith("{") and text.endswith("}") and text.count("{") == 1:
        text = text[1:-1]
    parts, depth = [""], 0
    for char in text:
        depth += (char in _OPENING) - (char in _CLOSING)
        if char in ",;" and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    parts = [part.strip() for part in parts]
    if any(part.count("\\pm") == 1 for part in parts):
        parts = [one.strip() for part in parts for one in _both_signs(part)]
    return parts


def _both_signs(part: str) -> list[str]:
    if part.count("\\pm") != 1 or "\\mp" in part:
        return [part]
    return [part.replace("\\pm", sign) for sign in "+-"]


def _unwrapped(answer: str) -> str:
    text, before = answer.strip(), None  # repeat, because delimiters nest: **$5$**
    while text != before:
        before = text
        for left, right in _WRAPPERS:
            if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
                inner = text[len(left) : -len(right)]
                if left not in inner and right not in inner:
                    text = inner.strip()
        text = _WHOLE_TEXT.sub(r"\1", text.removesuffix(".").strip())
    return text
