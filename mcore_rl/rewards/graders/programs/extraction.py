"""Extraction of the program from a response."""

from __future__ import annotations

import re

_OPENING = re.compile(
    r"^([ \t]*)(`{3,}|~{3,})[ \t]*([\w+.-]*)[^\n`]*$"  # a fence on its own line
    r"|`{3}[ \t]*(python[\d.]*|py3?)[ \t]*$",  # a Python fence behind other text
    re.IGNORECASE | re.MULTILINE,
)
_PYTHON = re.compile(r"python[\d.]*|py3?", re.IGNORECASE)


def extract_program(response: str) -> str | None:
    """Return the last fenced Python block, else the last fenced block, else None.

    A block ends at a fence at the start or end of a line, or with the response. A fence inside a line, such as in a
    string, does not end it.
    """
    text, place = response.replace("\r\n", "\n"), 0
    python, last = None, None
    while (opening := _OPENING.search(text, place)) is not None:
        indent, fence, language, behind_text = opening.groups("")
        start = opening.end() + 1
        end, place = _closing(text, start, fence or "```")
        last = text[start:end]
        if indent:  # the code is indented like its fence
            last = re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", last, flags=re.MULTILINE)
        if _PYTHON.fullmatch(language or behind_text):
            python = last
    return last if python is None else python


def _closing(text: str, start: int, fence: str) -> tuple[int, int]:
    """Return the end of the block and the start of the text behind its closing fence."""
    closing = re.compile(rf"^[ \t]*{fence[0]}{{{len(fence)},}}|{fence[0]}{{{len(fence)},}}[ \t]*$", re.MULTILINE)
    found = closing.search(text, start)
    return (found.start(), found.end()) if found else (len(text), len(text))
