"""Extraction of the program from a response."""

from __future__ import annotations

import re

_OPENING = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([\w+.-]*)[^\n`]*$", re.MULTILINE)
_PYTHON = re.compile(r"python[\d.]*|py3?", re.IGNORECASE)


def extract_program(response: str) -> str | None:
    """Return the last fenced Python block, else the last fenced block, else None.

    A block ends at a fence at the start or end of a line, or with the response. A fence inside a line, such as in a
    string, does not end it.
    """
    text, blocks, place = response.replace("\r\n", "\n"), [], 0
    own, inline = _OPENING.search(text), _INLINE.search(text)
    while (opening := _first(own, inline)) is not None:
        indent, fence, language = opening.groups()
        start = opening.end() + 1
        end, place = _closing(text, start, fence)
        blocks.append((bool(_PYTHON.fullmatch(language)), _dedented(text[start:end], len(indent)), language))
        own, inline = (_from(place, text, each) for each in (own, inline))
    python = [code for is_python, code, _ in blocks if is_python]
    return python[-1] if python else blocks[-1][1] if blocks else None


def _first(own: re.Match[str] | None, inline: re.Match[str] | None) -> re.Match[str] | None:
    """Return the earlier match: a fence on its own line, or a Python fence behind other text."""
    return min((each for each in (own, inline) if each), key=lambda match: match.start(2), default=None)


def _from(place: int, text: str, found: re.Match[str] | None) -> re.Match[str] | None:
    """Return the next match at or after `place`.

    A match ahead of `place` is reused, because a new search for every block would take quadratic time.
    """
    return found if found is None or found.start() >= place else found.re.search(text, place)


_INLINE = re.compile(r"()(`{3})[ \t]*(python[\d.]*|py3?)[ \t]*$", re.IGNORECASE | re.MULTILINE)


def _closing(text: str, start: int, fence: str) -> tuple[int, int]:
    """Return the end of the block and the start of the text behind its closing fence."""
    closing = re.compile(rf"^[ \t]*{fence[0]}{{{len(fence)},}}|{fence[0]}{{{len(fence)},}}[ \t]*$", re.MULTILINE)
    found = closing.search(text, start)
    return (found.start(), found.end()) if found else (len(text), len(text))


def _dedented(code: str, width: int) -> str:
    """Remove up to `width` columns of indentation, which is the indentation of the fence."""
    return re.sub(rf"^[ \t]{{1,{width}}}", "", code, flags=re.MULTILINE) if width else code
