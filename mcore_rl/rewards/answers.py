r"""Extraction of the final answer from a response. Text is parsed, never evaluated.

The last mark of each kind counts. Between kinds:
- `\boxed{...}` precedes `#### ...`, regardless of their order in the text;
- `<answer>...</answer>` limits the text that is searched for the marks below, unless there is a box;
- `Answer: ...`, the last line that DAPO's prompt requests, counts if it is the last mark. A box behind it or in it
  replaces it.
Boxes joined by a comma, `and` or `or` are one answer: a list. Without a mark, the answer is the last formula or number
(rewards.formulas), after the letter of a choice if a sentence names one: `The answer is (C).`
"""

from __future__ import annotations

import re

from mcore_rl.rewards.formulas import last_formula, without_dollars
from mcore_rl.rewards.notation.choices import named_choice, parse_choice

MAX_ANSWER_CHARS = 1000
MAX_BOX_CANDIDATES = 12
"""Number of boxes to examine from the end, which limits the time for texts with many unclosed boxes."""
MAX_JOINT_CHARS = 40
"""Maximum distance between two boxes of one answer."""
MIN_PROSE_WORDS = 3

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is a symbol and does not nest
# text between two boxes of one answer; it may repeat the variable: `x = \boxed{1}` or `x = \boxed{2}`
_JOINT = re.compile(
    r"[\s$]*(?:\\[\])])?[\s$]*(?:,|;|,?\s*(?:\\(?:text|mbox|quad|qquad)\s*\{?\s*)?(?:and|or)\b\s*\}?)[\s$]*(?:\\[\[(])?[\s$]*"
    r"(?:\\q?quad|\\[,; ])?\s*(?:(?P<name>[A-Za-z](?:_\{?\w\}?)?)\s*=\s*)?"
)
_NAMED = re.compile(r"([A-Za-z])(?:_\{?\w\}?)?\s*=\s*$")
_ANSWER = re.compile(r"(?i)\banswer\s*(?:\*\*|__)?\s*[:\uff1a]")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


def extract_answer(response: str) -> str | None:
    """Return the final answer of a response by the module's rules; None if there is none."""
    box, start = _last_boxes(response)
    if box is None and (tagged := _tagged(response)):
        response = tagged
    # The test for the letters is much faster than the case-insensitive pattern.
    marks = list(_ANSWER.finditer(response)) if "nswer" in response or "NSWER" in response else []
    line = _answer_line(response, marks[-1].end()) if marks else None
    if box is not None and (line is None or start > marks[-1].end()):
        return box
    if box is None and (line is None or response.rfind("####") > marks[-1].end()):
        return after_hashes(response) or line or _formula_or_choice(response)
    return line


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...} (braces may nest) or `\boxed 5`; joined boxes: `1, 2`."""
    return _last_boxes(text)[0]


def last_box(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...} or `\boxed 5`, without the boxes joined to it."""
    contents = (_braced(text, match.end())[0] for match in reversed(list(_BOX.finditer(text))[-MAX_BOX_CANDIDATES:]))
    return next((content.strip() for content in contents if content is not None), None)


def after_hashes(text: str) -> str | None:
    """Return the text behind the last `####` on its line; None if there is none."""
    _, hashes, rest = text.rpartition("####")
    return (_first_line(rest) or None) if hashes else None


def is_prose(text: str) -> bool:
    """Return whether a text has too many words for an answer."""
    return len(_WORD.findall(text)) >= MIN_PROSE_WORDS


def _tagged(text: str) -> str:
    """Return the content of the last `<answer>...</answer>`, which may lack its end; empty if there is none."""
    _, opening, rest = text.rpartition("<answer>")
    return rest.partition("</answer>")[0].strip() if opening else ""


def _answer_line(text: str, start: int) -> str | None:
    line = _first_line(text[start : start + 2 * MAX_ANSWER_CHARS].lstrip("* \t\n")).rstrip("*. ")
    line = without_dollars(line)
    if is_prose(line):
        return _formula_or_choice(line) or line
    return line or None


def _formula_or_choice(text: str) -> str | None:
    """Return the last formula, after the letter of a multiple-choice answer if a sentence names one: `(C) 42`."""
    formula, letter = last_formula(text), named_choice(text)
    if letter is None:
        return formula
    value = "" if formula is None or parse_choice(formula) is not None else formula  # $(C)$ repeats the letter
    return f"({letter}) {value}".strip()


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0].strip()[:MAX_ANSWER_CHARS]


def _last_boxes(text: str) -> tuple[str | None, int]:
    """Return the answer in the last box or joined boxes, and the start of the last box (-1 if there is none)."""
    if "box" not in text:
        return None, -1
    contents: list[str] = []
    last, next_start = -1, -1
    for match in reversed(list(_BOX.finditer(text))[-MAX_BOX_CANDIDATES:]):
        content, end = _braced(text, match.end())
        if content is None or (contents and not _joined(text, match.start(), end, next_start)):
            if contents:
                break
            continue
        contents.insert(0, content.strip())  # the loop runs from the last box to the first
        last, next_start = max(last, match.start()), match.start()
    # A repeated box is one answer: \boxed{5}, \boxed{5} is 5.
    return ", ".join(dict.fromkeys(contents)) or None, last


def _joined(text: str, start: int, end: int, next_start: int) -> bool:
    """Return whether the box from `start` to `end` and the box at `next_start` belong to one answer.

    Boxes of different variables (x and y) do not.
    """
    joint = _JOINT.fullmatch(text, end, next_start) if next_start - end <= MAX_JOINT_CHARS else None
    if joint is None:
        return False
    named = _NAMED.search(text[max(0, start - 10) : start])
    return joint["name"] is None or (named is not None and named[1] == joint["name"][0])


def _braced(text: str, start: int) -> tuple[str | None, int]:
    if not text.startswith("{", start):
        word = re.match(r"[^\s${}\\]+", text[start : start + MAX_ANSWER_CHARS])
        return (word.group().rstrip(".,"), start + word.end()) if word else (None, start)
    depth = 0
    for brace in _BRACE.finditer(text, start, start + MAX_ANSWER_CHARS):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start + 1 : brace.start()], brace.end()
    return None, start
