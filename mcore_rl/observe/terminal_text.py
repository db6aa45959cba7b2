"""Texts of models and of files, made safe for a terminal."""

from __future__ import annotations

import re
import unicodedata

from rich.text import Text

_MARKS = {"\n": "↵", "\r": "↵", "\t": " "}
"""Characters that are shown as one other character: a text stays on one line, so that it cannot imitate other lines."""
_HIDDEN = re.compile(r"[^\x20-\x7e]")
"""Candidates for a replacement; the others are printable."""


def visible(text: str, style: str = "") -> Text:
    """Return the text on one line. Control, bidirectional and other invisible characters become their number, such as
    U+202E; rich's markup is not interpreted."""
    return Text(_HIDDEN.sub(_shown, text), style=style)


def printable(text: str) -> str:
    """Return a message for `print`: as `visible`, but it keeps its lines."""
    return "\n".join(_HIDDEN.sub(_shown, line) for line in text.split("\n"))


def shortened(text: str, num_chars: int) -> str:
    """Cut a text in the middle to about `num_chars`: the end of a response has its answer."""
    if len(text) <= num_chars:
        return text
    first = num_chars // 3
    return f"{text[:first]} [... {len(text) - num_chars} characters ...] {text[first - num_chars :]}"


def _shown(match: re.Match[str]) -> str:
    character = match[0]
    if character in _MARKS:
        return _MARKS[character]
    # isprintable is False for controls, directional marks, half surrogate pairs and line separators. It is also False
    # for blanks such as U+3000, which Chinese and Japanese texts contain.
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return f"U+{ord(character):04X}"
