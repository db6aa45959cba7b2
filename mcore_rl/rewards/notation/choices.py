r"""Parsing of multiple-choice answers: `(C)`, `C.`, `Option C`, `\textbf{(C)}\ 5`, and sentences that name a choice."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_TAIL_CHARS = 2000
MAX_CHARS = 400
"""Longer answers are not parsed as a choice, because the patterns below take quadratic time."""

_OPEN = r"(?:\$|\\\(|\*\*|__|\\boxed\s*\{|\\(?:text|textbf|mathrm|mathbf|textrm|mbox)\s*\{|\\left|\s)*"
_CLOSE = r"(?:\$|\\\)|\*\*|__|\}|\\right)*"
_LETTER = (
    rf"{_OPEN}(?:\(\s*{_OPEN}(?P<round>[A-Ja-j])\s*{_CLOSE}\s*(?:\\right\s*)?\)(?!\s*(?:[\^_=+/<>]|\*(?!\*)))|\[(?P<square>[A-J])\]"
    rf"|(?P<bare>[A-HJ])(?![A-Za-z0-9_^'\u2019]))"
)
_NOUN = r"(?:answer|choice|option|alternative)"
# text behind a bare letter: the end of a sentence, punctuation, or a word such as `because`
_END = rf"{_CLOSE}\s*(?:$|[.,;:)!\n]|\*\*|(?=because|since|as\b|which|\())"
_ANOTHER = rf"(?!{_CLOSE}\s*(?:[,;/&]|or\b|and\b)\s*{_OPEN}\(?[A-J]\)?(?![A-Za-z]))"
_IS = re.compile(
    rf"\b{_NOUN}s?\s*(?:\*\*|__)?\s*(?:is|would be|must be|should be|:|\uff1a)\s*(?:\*\*|__)?\s*:?\s*"
    rf"(?:therefore\s+|thus\s+|simply\s+)?(?:the\s+)?(?:{_NOUN}\s+)?{_LETTER}{_ANOTHER}(?:(?<=\))|{_END})",
    re.IGNORECASE,
)
_CORRECT = re.compile(
    rf"(?:^|[.!?\n])\s*(?:(?:hence|therefore|so|thus)\s*,?\s*)?(?:the\s+)?(?:{_NOUN}\s+)?{_LETTER}{_CLOSE}\s+"
    rf"is\s+(?:therefore\s+|thus\s+)?(?:the\s+)?(?:correct|right)\b",
    re.IGNORECASE,
)
_ALONE = re.compile(rf"{_OPEN}(?:{_NOUN}\s*:?\s+)?{_LETTER}{_CLOSE}\s*[.:)]?\s*(?:\*\*|\$)?\s*", re.IGNORECASE)
_LEADING = re.compile(
    rf"(?:{_NOUN}\s*:?\s+)?"
    r"(?:(?:\\(?:text|textbf|mathrm)\s*\{)?\(?(?P<marked>[A-HJ])[).:]\s*\}?(?:\s|\\[,;: ]|\\q?quad|~)+"
    rf"|{_LETTER}{_CLOSE}\s*[.:]?(?:\s|\\[,;: ]|\\q?quad|~|\$)+)"
    r"(?P<content>(?![-+*/=^,<>]\s|\\(?:cup|cap|times|cdot|setminus|to|in)(?![A-Za-z]))\S.*)",
    re.IGNORECASE | re.DOTALL,
)


_BLANKS = re.compile(r"\s+")  # collapsed first: the patterns above take superlinear time for runs of spaces


class Choice(NamedTuple):
    """A letter and the answer after it (`5` in `(C) 5`), which may be empty."""

    letter: str
    content: str


def parse_choice(text: str) -> Choice | None:
    r"""Parse an answer such as `(C)`, `\text{(C)}`, `C`, `C.`, `Option C` or `(C) 5`; None if it is not a choice."""
    if len(text) > MAX_CHARS:
        return None
    text = _BLANKS.sub(" ", text.strip())
    if alone := _ALONE.fullmatch(text):
        letter = _letter(alone)
        return Choice(letter, "") if letter else None
    leading = _LEADING.fullmatch(text)
    if leading is None or not re.search(r"[0-9\\]", leading["content"]):
        return None
    letter = leading["round"] or leading["square"] or leading["marked"]  # `A 5` may be a product
    return Choice(letter.upper(), leading["content"].strip()) if letter else None


def named_choice(response: str) -> str | None:
    """Return the letter in the last sentence that names the answer, or in a last line that is only a choice."""
    tail = _BLANKS.sub(lambda blanks: "\n" if "\n" in blanks.group() else " ", response[-MAX_TAIL_CHARS:].strip())
    named = [match for pattern in (_IS, _CORRECT) for match in pattern.finditer(tail)]
    letters = [(match.start(), letter) for match in named if (letter := _letter(match))]
    if letters:
        return max(letters)[1]
    alone = _ALONE.fullmatch(tail.rpartition("\n")[2].strip())
    return (_letter(alone) or None) if alone else None


def _letter(match: re.Match[str]) -> str:
    """Return the letter in upper case; empty for a bare lower-case letter, which is a variable or a word."""
    bare = match["bare"] or ""
    return (match["round"] or match["square"] or (bare if bare.isupper() else "")).upper()
