r"""Boxes in texts, whole and without their command: `\boxed{5}` and `5`."""

from __future__ import annotations

BOX, BARE_BOX = "\\boxed{", "\\boxed "


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last `\boxed{...}` or `\fbox{...}` of a text with its command, or None if it has none or no end.

    `\boxed 5$` without braces counts too, up to the next dollar.
    """
    if BARE_BOX in string:
        return BARE_BOX + string.rpartition(BARE_BOX)[2].partition("$")[0]
    start = string.rfind("\\boxed")
    return braced(string, start if start >= 0 else string.rfind("\\fbox"))


def last_braced_box(string: str) -> str | None:
    r"""Return the last `\boxed{...}` of a text with its command, or None if it has none or no end."""
    return braced(string, string.rfind(BOX))


def remove_boxed(s: str) -> str:
    r"""Return the content of `\boxed{...}` or `\boxed ...`.

    Raises: AssertionError for a text that is no box, as verl does.
    """
    if s.startswith(BARE_BOX):
        return s.removeprefix(BARE_BOX)
    if not (s.startswith(BOX) and s.endswith("}")):
        raise AssertionError(f"not a box: {s}")
    return s[len(BOX) : -1]


def box_content(s: str) -> str | None:
    r"""Return the content of `\boxed{...}`, or None for a text that is no box."""
    return s[len(BOX) : -1] if s.startswith(BOX) and s.endswith("}") else None


def braced(string: str, start: int) -> str | None:
    """Return the text from `start` to the brace that closes the first one behind it; escapes do not count."""
    if start < 0:
        return None
    depth = 0
    for index in range(start, len(string)):
        depth += (string[index] == "{") - (string[index] == "}")
        if string[index] == "}" and depth == 0:
            return string[start : index + 1]
    return None
