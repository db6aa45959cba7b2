"""Regular expressions in JSON schemas, as far as the engines enforce them exactly.

The engines match a whole string with a pattern, also one without anchors. They ignore lookaheads and anchors inside of
a pattern, and of a large automaton they forget that quotes must be escaped (xgrammar 0.2.8).
"""

from __future__ import annotations

import re

MAX_SIZE = 40
"""Maximum number of characters and character classes of a pattern with its repetitions written out. A pattern
of 45 needed more than 7 s to compile (xgrammar 0.2.8)."""
MAX_REPETITIONS = 10_000
"""Number of repetitions as which larger ones are counted."""
_PARTS = re.compile(
    r"""(?P<atom>\\. | \[\^?\]?(?:\\.|[^\]\\])*\]) | (?P<group>\(\?:|\(\?|\() | (?P<end>\)) | (?P<or>\|)
    | (?P<often>[*+?]\??) | \{(?P<low>\d+)(?:,(?P<high>\d*))?\}\?? | (?P<first>\^) | (?P<last>\$) | (?P<plain>.)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = re.compile(r"[\0-\x1f\ud800-\udfff]|(?<!\\)(?:\\\\)*\\[^\W_dws]")
"""Control characters, which the engines would write into JSON as they are, and escapes that may mean some."""


def pattern_fault(pattern: str) -> str | None:
    """Return the reason why engines would not enforce a pattern exactly; None if they do."""
    parts = list(_PARTS.finditer(pattern))
    if any(part["group"] == "(?" for part in parts):
        return "has a group that begins with (?, and only (?:...) and (...) are supported"
    if _ESCAPES.search(pattern):
        return r"has an escape or a control character; escapes may be \d, \w, \s, and punctuation"
    if any(not part[0].startswith("[^") and ('"' in part[0] or "\\\\" in part[0]) for part in parts):
        return "has a quote or a backslash, which the engines would write into JSON as they are"
    if any(part["first"] and part.start() for part in parts):
        return "has ^ behind its beginning"
    if any(part["last"] and part.end() < len(pattern) for part in parts):
        return "has $ before its end"
    if pattern_size(pattern) > MAX_SIZE:
        return f"has more than {MAX_SIZE} characters with its repetitions written out"
    return None


def pattern_size(pattern: str) -> int:
    """Return the number of characters and classes with all repetitions written out. Parentheses that do not match are
    left to the compiler."""
    sizes, last = [0], 0
    """Sizes of the open groups, and of the last part."""
    for part in _PARTS.finditer(pattern):
        if part["group"]:
            sizes.append(0)
        elif part["end"] and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif part["low"]:
            counts = [int(count) if len(count) < 6 else MAX_REPETITIONS for count in (part["low"], part["high"] or "0")]
            often = max(*counts, 1)
            sizes[-1] += last * (often - 1)
            last *= often
        elif part["atom"] or part["plain"]:
            last = 1
            sizes[-1] += 1
    return sum(sizes)
