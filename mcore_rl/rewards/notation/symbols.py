r"""Normalization of symbols with several spellings: `\cup` for `∪`, `\mathbb{R}` for `\R`, `^{2}` for `**2`."""

from __future__ import annotations

import re

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
)
_MEMBER = re.compile(r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*(?=\S)")


def plain_symbols(text: str) -> str:
    """Replace the spellings in the table by their normal form."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def without_member(text: str) -> str:
    r"""Return the set in `x\in\{1, 2\}`; return any other text unchanged."""
    return _MEMBER.sub("", text)
