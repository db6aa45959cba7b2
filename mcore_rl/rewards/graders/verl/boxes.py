r"""Extraction of boxes from text, with their command (`\boxed{5}`) and without it (`5`)."""

from __future__ import annotations

BOX, BARE_BOX = "\\boxed{", "\\boxed "


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last `\boxed{...}` or `\fbox{...}` with its command, or None if it is missing or not closed.

    A box without braces, `\boxed 5$`, ends at the next dollar sign.
    """
    if BARE_BOX in string:
        return BARE_BOX + string.rpartition(BARE_BOX)[2].partition("$")[0]
    start = string.rfind("\\boxed")
    return braced(string, start if start >= 0 else string.rfind("\\fbox"))


def last_braced_box(string: str) -> str | None:
    r"""Return the last `\boxed{...}` with its command, or None if it is missing or not closed."""
    return braced(string, string.rfind(BOX))


def remove_boxed(s: str) -> str:
    r"""Return the content of `\boxed{...}` or `\boxed ...`.

    Raises: AssertionError for any other text, as verl does.
    """
    if s.startswith(BARE_BOX):
        return s.removeprefix(BARE_BOX)
    if not (s.startswith(BOX) and s.endswith("}")):
        raise AssertionError(f"not a box: {s}")
    return s[len(BOX) : -1]


def box_content(s: str) -> str | None:
    r"""Return the content of `\boxed{...}`, or None for any other text."""
    return s[len(BOX) : -1] if s.startswith(BOX) and s.endswith("}") else None


def braced(string: str, start: int) -> str | None:
    """Return the text from `start` to the brace that closes its first brace. Escaped braces count like others."""
    if start < 0:
        return None
    depth = 0
    for index in range(start, len(string)):
        depth += (string[index] == "{") - (string[index] == "}")
        if string[index] == "}" and depth == 0:
            return string[start : index + 1]
    return None
