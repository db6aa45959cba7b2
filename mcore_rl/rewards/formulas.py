r"""Search for the last formula in a text without a marked answer: `\frac{1}{2}` or `17/34`, not their last number.

A formula is the content of math delimiters ($...$, \(...\), \[...\]), or a run of numbers, operators, brackets, single
letters, and LaTeX commands. A number between words is the shortest formula. The last side of an equation counts: 7 in
`3 + 4 = 7`.
"""

from __future__ import annotations

import re
from itertools import chain, pairwise
from typing import NamedTuple

from mcore_rl.rewards.numbers import DECIMAL, MULTIPLES, NOT_UNITS, expand_repeating, join_groups

MAX_TAIL_CHARS = 4000
"""Length of the end of a text in which display formulas may span several lines."""
MAX_LINE_CHARS = 2000
"""Longer lines are cut at their start."""
MAX_USUAL_CHARS = 120
"""Length of the end of a line that the fast path reads."""

_CALCULATIONS = re.compile(r"<<[^<>]*>>")  # calculator annotations of GSM8K's solutions
_DISPLAY = re.compile(r"\\\[(?P<bracket>.{1,1000}?)\\\]|\$\$(?P<dollars>.{1,1000}?)\$\$", re.DOTALL)
_CURRENCY = re.compile(rf"(?<![\w\\}}])(?P<sign>[-\u2212+]?)\\?[$\u20ac\u00a3](?=\s?{DECIMAL})")
_CURRENCY_BEHIND = re.compile(r"(?<=[0-9])\s?(?:\\?\$|[\u20ac\u00a3])(?![0-9$\\])")
_POWER_OF_UNIT = re.compile(
    r"(?<=[0-9])\s*((?:[A-Za-z]{2,})|\s[ms])\s*(?:\^\s*\{?[23]\}?|[\u00b2\u00b3])(?![0-9A-Za-z])"
)
_BULLET = re.compile(r"^\s*(?:[-*+]\s|[0-9]+[.)]\s(?=.*[0-9]))")
# fast path for the usual end of a solution, such as `= $18 every day.`
_USUAL = re.compile(
    rf"(?:=\s?|(?<![\w\\])(?P<before>[A-Za-z]{{2,}})\s)[$\u20ac\u00a3]?(?P<number>{DECIMAL}%?)"
    r"(?P<words>(?:\s[A-Za-z]{2,})*)\.?\s*$"
)
# alternatives are tried in order: `2.5` is a number; digits are the remaining ones, as in `_2`
_TOKEN = re.compile(
    r"(?P<math>(?<![\\$])\$(?=[^\s$])(?:[^$\\]|\\.){0,500}?(?<=\S)\$(?![0-9])|\\\(.{1,500}?\\\))"
    rf"|(?P<number>(?<![\w.]){DECIMAL}(?:\s?\\?%)?)"
    r"|(?P<command>\\[A-Za-z]+(?:\s*\{[A-Za-z ]*\})?|\\[^A-Za-z\s]|\u03c0|\u221a|\u221e|\u00b0)"
    r"|(?P<word>[A-Za-z][A-Za-z'\u2019]+[0-9]*(?:['\u2019-][A-Za-z]+)*|[A-Za-z][0-9]\w*|[^\W\d_a-zA-Z]+)"
    r"|(?P<operator>(?<=[0-9)] )x(?= [0-9(])|[-+&*/=^_<>:\u00d7\u00b7\u00f7\u00b1\u2264\u2265\u2248\u2212]+)"
    r"|(?P<letter>[A-Za-z])"
    r"|(?P<digits>[0-9]+)"
    r"|(?P<open>[(\[{])|(?P<close>[)\]}])"
    r"|(?P<comma>[,;])"
    r"|(?P<mark>[!|'])"
    r"|(?P<other>\S)"
)
_NAME = re.compile(
    r"\s*(?:(?!\\pi\b)\\?[A-Za-z]+|[A-Za-z]_\{?\w\}?|\\(?:triangle|angle|overline\s*\{?)\s*[A-Z]+\}?)\s*"
)
_EQUALS = re.compile(r"(?<![<>!:\\])=|\\approx|\u2248|\\Rightarrow|\\implies|\\equiv(?=\s*[0-9])")
_EQUATION = re.compile(r"[0-9][a-z]\b.*=\s*[-0-9.]+$")  # the answer 5x + 4y = 0 is the equation, not its side 0
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}\s+[A-Za-z]{2,}")


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


def last_formula(text: str) -> str | None:
    """Return the last formula or number of a text, searching lines from the end; None if there is none."""
    head, tail = text[:-MAX_TAIL_CHARS], text[-MAX_TAIL_CHARS:]
    tail_lines = reversed(_DISPLAY.sub(_on_one_line, _CALCULATIONS.sub("", tail)).splitlines())
    head_lines = (_CALCULATIONS.sub("", line[-MAX_LINE_CHARS:]) for line in reversed(head.splitlines()))
    return next((found for line in chain(tail_lines, head_lines) if (found := _in_line(line)) is not None), None)


def without_dollars(line: str) -> str:
    """Remove the delimiters of a line that is one delimited formula; return any other line unchanged."""
    spans = [token for token in _tokens(line) if token.kind == "math"]
    rest = line.replace(spans[0].text, "").strip(" .*") if len(spans) == 1 else "-"
    return _inside(spans[0].text) if not rest else line


def _on_one_line(match: re.Match[str]) -> str:
    content = " ".join((match["bracket"] or match["dollars"]).split())
    return rf"\({content}\)"


def _in_line(line: str) -> str | None:
    line = expand_repeating(line[-MAX_LINE_CHARS:])
    ending = line[-MAX_USUAL_CHARS:]
    usual = _USUAL.search(ending)
    # Neither an equation such as 5x + 4y = 0 nor a word that changes the value takes the fast path.
    if usual and _EQUATION.search(ending[: usual.end("number")]):
        usual = None
    if usual and NOT_UNITS.isdisjoint([(usual["before"] or "").lower(), *usual["words"].lower().split()[:1]]):
        return usual["number"]
    line = join_groups(_BULLET.sub("", line))
    line = _POWER_OF_UNIT.sub(r" \1", line).replace("**", "").replace("`", "")
    tokens = _tokens(line)
    # A dollar sign is a currency only if it delimits no formula on this line.
    if not any(token.kind == "math" for token in tokens):
        tokens = _tokens(_CURRENCY_BEHIND.sub("", _CURRENCY.sub(r"\g<sign>", line)))
    glued = _glued(tokens)
    for last in reversed(range(len(tokens))):
        token = tokens[last]
        if token.kind == "math" and not _NAME.fullmatch(_inside(token.text)):
            return _last_side(_inside(token.text))
        if token.kind in ("number", "digits"):
            return _run(tokens, glued, last)
    return None


def _tokens(line: str) -> list[_Token]:
    tokens = []
    position = 0
    while match := _TOKEN.search(line, position):
        kind, text = str(match.lastgroup), match.group()
        if kind == "math" and _PROSE.search(text):  # "$5 each, and 10$ more" has two prices, not a formula
            kind, text = "other", text[0]
        position = match.start() + len(text)
        tokens.append(_Token(kind, text, match.start(), position))
    return tokens


def _inside(math: str) -> str:
    return (math[2:-2] if math.startswith("\\") else math[1:-1]).strip()


def _glued(tokens: list[_Token]) -> list[bool]:
    """Return one flag per token: whether it and the next token belong to the same formula."""
    glued = [_belong(one, two) for one, two in pairwise(tokens)] + [False]
    for index, (one, two, slash) in enumerate(zip(tokens, tokens[1:], tokens[2:], strict=False)):
        if one.kind == two.kind == "number" and slash.text == "/":
            glued[index] = True  # the mixed number 3 1/2
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if token.kind == "open":
            opened.append(index)
        elif token.kind == "close" and opened:
            start = opened.pop()
            # A bracket belongs to a formula if it contains no prose: (2 x) does, (see above) does not.
            if not any(t.kind in ("word", "other", "math") for t in tokens[start:index]):
                glued[start:index] = [True] * (index - start)
    return glued


def _belong(one: _Token, two: _Token) -> bool:
    kinds = (one.kind, two.kind)
    touching = one.end == two.start
    if "other" in kinds or "math" in kinds:
        return False
    if one.kind == "word" and two.kind == "open":
        return touching  # sqrt(2)
    if one.text == "/" and two.kind == "word":
        return False  # 30/hour
    if "word" in kinds:
        # "tax + 5" is a formula with a word, so its 5 is not the answer; "Total = 5" gives 5. A dash is punctuation.
        operator = one if two.kind == "word" else two
        return operator.kind == "operator" and operator.text not in "=:-\u2212><"
    if "comma" in kinds:
        return touching
    if "operator" in kinds or ("command" in kinds and "letter" not in kinds):
        return True  # 2 \pi and \frac 12 are one formula each
    return touching


def _run(tokens: list[_Token], glued: list[bool], index: int) -> str:
    first = last = index
    while first > 0 and glued[first - 1]:
        first -= 1
    while glued[last]:
        last += 1
    if last + 1 < len(tokens) and tokens[last + 1].text.lower() in MULTIPLES:
        last += 1
    text, end = "", tokens[first].start
    for token in tokens[first : last + 1]:
        text += (" " if token.start > end else "") + token.text
        end = token.end
    return _last_side(text.rstrip("=:-<>/,; ").lstrip(":,; "))


def _last_side(formula: str) -> str:
    if _EQUATION.search(formula):
        return formula
    sides = [side.strip() for side in _EQUALS.split(formula) if side.strip()]
    while len(sides) > 1 and _NAME.fullmatch(sides[-1]):
        sides.pop()  # `20 = x` names its result on the right
    return sides[-1] if sides else formula
