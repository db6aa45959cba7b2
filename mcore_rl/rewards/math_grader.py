r"""Comparison of a response's final answer with the reference answer.

rewards.answers extracts the answer. It is compared as normalized text (rewards.spelling); as an exact number; as an
unordered list, `1, 2` or `\{1, 2\}`; and as an expression by math-verify, within 1 s and 512 MiB per answer
(rewards.expressions).

The reference resolves ambiguous answers: `3,14` is a decimal if the reference is 3.14 and a list if the reference is a
list; `1,234` is 1234 (never 1.234), or a list if the reference is a list; `2, 100` is a list (never 2100). An answer
may omit the reference's unit but not contradict it.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import partial, reduce

from mcore_rl.rewards.answers import MAX_ANSWER_CHARS, after_hashes, extract_answer, is_prose, last_boxed
from mcore_rl.rewards.expressions import same_expression, within_limits
from mcore_rl.rewards.formulas import last_formula
from mcore_rl.rewards.notation.choices import named_choice, parse_choice
from mcore_rl.rewards.notation.clock import parse_time, plain_colons, same_time
from mcore_rl.rewards.numbers import FORMULA, NOT_UNITS, is_rounded, number_in_words, parse_decimal_comma, parse_number
from mcore_rl.rewards.spelling import elements, normalise

MAX_ELEMENTS = 12

# spaces except between digits: "1 2" is not 12
_INNER_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")
# spaces except between digits and behind a comma: "2, 100" is not 2100
_COMPACT = re.compile(r"(?<![0-9,]) | (?![0-9,])(?<!,)")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_BASE = re.compile(r"[0-9]\s*_")  # 52_8 is a numeral, not the number 52
_BRACKETS = re.compile(r"[(\[]|\\\{")
_EXPONENT = re.compile(r"[0-9][eE][-+]?[0-9]")
# E notation inside a point or interval, such as 1e-20. The expression is first compared with e as Euler's number.
_E_NOTATION = re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?|\.[0-9]+)[eE]([-+]?[0-9]{1,3})(?![\w.])")
_PAIR = re.compile(r"([(\[])[^()\[\]]*,[^()\[\]]*([)\]])")
_SET_OPERATOR = re.compile(r"\\(cup|cap|setminus|backslash)(?![A-Za-z])")
_SET = re.compile(r"\s*\\\{((?:[^{}\\]|\\[A-Za-z]+|\\[,;! ]|\{[^{}]*\})*)\\\}\s*")
_MULTIPLE = re.compile(
    r"(?P<number>\S+) (?P<unit>hundred|thousand|million|billion|trillion|dozen)s?(?P<rest>(?: [a-z]{3,})*)"
)
_MULTIPLES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_MIXED = re.compile(r"(-?)\s*([0-9]{1,9})(?:\s+([0-9]{1,9})/([0-9]{1,9})|\s*\\frac\{([0-9]{1,9})\}\{([0-9]{1,9})\})")


def is_correct(response: str, ground_truth: object) -> bool:
    r"""Return whether the answer in `response` equals the reference. Answers too large to compare count as wrong.

    ground_truth: a number, an answer, a GSM8K solution (`... #### 72`), or a text with \boxed{...}.
    """
    answer = extract_answer(response)
    return answer is not None and same_answer(answer, reference_answer(ground_truth))


def reference_answer(ground_truth: object) -> str:
    """Return the answer in a ground truth; for sentences without a mark, their last formula or named choice."""
    text = str(ground_truth).strip()
    marked = after_hashes(text) or last_boxed(text)
    if marked is not None:
        return marked
    if is_prose(text) and not FORMULA.search(text):
        return last_formula(text) or named_choice(text) or text
    return named_choice(text) or text if is_prose(text) else text


def same_answer(answer: str, reference: str) -> bool:
    """Return whether two final answers are equivalent.

    An answer of more than MAX_ANSWER_CHARS characters is compared as text, because parsing it takes quadratic time.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return answer.strip() == reference.strip()
    # Fast path: most answers are plain numbers.
    numbers = parse_number(answer), parse_number(reference)
    if numbers[0] is not None and numbers[1] is not None:
        return _same_value(numbers[0], answer, numbers[1], reference)
    verdict = _same_time_or_choice(answer, reference)
    return _same_text_or_value(answer, reference) if verdict is None else verdict


def _same_time_or_choice(answer: str, reference: str) -> bool | None:
    """Compare times of day and multiple choices; None if the answers are something else."""
    time, expected_time = parse_time(answer), parse_time(reference)
    if expected_time is not None:
        return time is not None and same_time(time, expected_time)
    if time is not None and ":" not in plain_colons(reference):
        return False  # a time such as 6:15 is not the ratio 2/5
    # An answer may name the letter, its content, or both: `C`, `5`, and `(C) 5` are equal if the reference is `(C) 5`.
    choice, expected_choice = parse_choice(answer), parse_choice(reference)
    if expected_choice is None:
        return same_answer(choice.content, reference) if choice is not None and choice.content else None
    if choice is None:
        return same_answer(answer, expected_choice.content) if expected_choice.content else None
    if choice.letter != expected_choice.letter:
        return False
    contents = choice.content, expected_choice.content
    return not all(contents) or same_answer(*contents)


def _same_text_or_value(answer: str, reference: str) -> bool:
    (given, unit), (expected, expected_unit) = normalise(answer), normalise(reference)
    # A missing or unknown unit contradicts nothing.
    if unit and expected_unit and unit != expected_unit:
        return False
    if _flat(given) == _flat(expected):
        return bool(expected)
    if _BASE.search(given) or _BASE.search(expected):
        return False
    value = _value_of_words(expected)
    if value is not None:
        known = _value_of_words(given)
        # Only a reference that is no integer permits a decimal comma: `3,14` is a list otherwise.
        if known is None and value.denominator != 1:
            known = parse_decimal_comma(given)
        if known is not None:
            return _same_value(known, given, value, expected)
    # In LaTeX, a word is a product of its letters, which would make anagrams equal.
    if not given or given.replace(" ", "").isalpha():
        return False
    return within_limits(lambda: _same_in_parts(given, expected, value))


def value_of(answer: str) -> Fraction | None:
    """Return the exact value of an answer that is a number, else None. 5% has the value 5."""
    return _value(normalise(answer)[0])


def _same_in_parts(given: str, expected: str, value: Fraction | None) -> bool:
    given, expected = _finite_set(given), _finite_set(expected)
    ours = elements(given)
    theirs = elements(expected) if value is None else [_ungrouped(expected)]
    if len(ours) != len(theirs):
        ours = elements(_ungrouped(given))  # 1,234 is a number here, not a list of two
    if len(ours) == len(theirs) == 1:
        given, expected = (given, expected) if _BRACKETS.match(given) else (ours[0], theirs[0])
        if _other_ends(given, expected):
            return False
        points = _coordinates(given), _coordinates(expected)
        if len(points[0]) > 1 and len(points[1]) > 1:
            return _same_in_order(*points)
        return _same_one(given, expected, value)
    if value is not None or max(len(ours), len(theirs)) > MAX_ELEMENTS:
        return False
    if len(ours) != len(theirs):
        # The point (1, 2) may be written as the list 1, 2, but the set \{1, 2\} is no point.
        braces = given.startswith("\\{") or expected.startswith("\\{")
        return not braces and _same_in_order(_coordinates(given) or ours, _coordinates(expected) or theirs)
    for one in ours:
        match = next((other for other in theirs if _same_element(one, other)), None)
        if match is None:
            return False
        theirs.remove(match)  # an element matches once, so 1, 1 is not 1, 2
    return True


def _same_element(one: str, other: str) -> bool:
    return _same_one(one, other, _value(other))


def _finite_set(text: str) -> str:
    r"""Evaluate operations on finite sets, such as `\{1,2\}\cup\{3\}`, to a set `\{1, 2, 3\}`; return any other text
    unchanged.

    Text with two different operators is unchanged too, because their precedence is not standardized.
    """
    parts = _SET_OPERATOR.split(text)  # operands and operators in turn
    operands, operators = [part.strip() for part in parts[::2]], set(parts[1::2])
    if len(operators) != 1 or len(operands) > MAX_ELEMENTS:
        return text
    if not all(operand == r"\emptyset" or _SET.fullmatch(operand) for operand in operands):
        return text
    sets = [[] if operand == r"\emptyset" else elements(operand) for operand in operands]
    if max(map(len, sets)) > MAX_ELEMENTS:
        return text
    members: list[str] = []
    for member in reduce(partial(_combined, parts[1]), sets):
        if not _is_member(member, members):
            members.append(member)
    return rf"\{{{', '.join(members)}\}}" if members else r"\emptyset"


def _combined(operator: str, one: list[str], other: list[str]) -> list[str]:
    if operator == "cup":
        return [*one, *other]
    return [member for member in one if _is_member(member, other) == (operator == "cap")]


def _is_member(element: str, members: list[str]) -> bool:
    return any(_same_element(element, member) for member in members)


def _other_ends(given: str, expected: str) -> bool:
    """Return whether both are bracketed pairs with different brackets, such as `[1, 2)` and `[1, 2]`."""
    ends = [match.groups() for text in (given, expected) if (match := _PAIR.fullmatch(text))]
    return len(ends) == 2 and ends[0] != ends[1]


def _ungrouped(text: str) -> str:
    """Write 1,000 as 1000 in a text without brackets."""
    if _BRACKETS.search(text):
        return text
    return _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)


def _same_in_order(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) > 1 and all(map(_same_element, ours, theirs))


def _coordinates(text: str) -> list[str]:
    """Return the coordinates of a point `(1, 2)`; empty for any other text."""
    inner = text[1:-1]
    return elements(inner) if text.startswith("(") and text.endswith(")") and not _BRACKETS.search(inner) else []


def _same_one(given: str, expected: str, value: Fraction | None) -> bool:
    if _flat(given) == _flat(expected):
        return bool(expected)
    known = _value(given)
    if known is not None and value is not None:
        return _same_value(known, given, value, expected)
    if given.replace(" ", "").isalpha():
        return False
    same = same_expression(_as_formula(given), _as_formula(expected), value)
    if same or not _E_NOTATION.search(given + expected):
        return same
    return same_expression(_power_of_ten(given), _power_of_ten(expected), value)


def _flat(text: str) -> str:
    text = _INNER_SPACE.sub("", _ungrouped(text))
    return text.lower() if text.isalpha() and len(text) > 1 else text


def _value_of_words(text: str) -> Fraction | None:
    """Return the value of a number, or of the only number among words: `72 apples`."""
    value = _value(text)
    return _value(number_in_words(text)) if value is None else value


def _value(text: str) -> Fraction | None:
    text = text.replace("\\%", "").rstrip("%").strip()
    if mixed := _MIXED.fullmatch(text):
        sign, whole, top, bottom = mixed[1], mixed[2], mixed[3] or mixed[5], mixed[4] or mixed[6]
        value = parse_number(f"{top}/{bottom}")
        return None if value is None else (int(whole) + value) * (-1 if sign else 1)
    multiple = _multiple(text)
    return parse_number(_COMPACT.sub("", text)) if multiple is None else multiple


def _as_formula(text: str) -> str:
    """Rewrite 5 million and 5e6 in LaTeX, which has neither notation."""
    number = _multiple(text)
    if number is not None:
        return str(number)
    return _power_of_ten(text) if _EXPONENT.search(text) and parse_number(text) is not None else text


def _power_of_ten(text: str) -> str:
    r"""Write 5e-6 as 5\times 10^{-6}: the written digits stay, because they set the precision of the comparison."""
    return _E_NOTATION.sub(r"\1\\times 10^{\2}", text)


def _multiple(text: str) -> Fraction | None:
    """Return the value of a text such as `5 million`, or None."""
    match = _MULTIPLE.fullmatch(text.lower())
    if match is None or not NOT_UNITS.isdisjoint(match["rest"].split()):
        return None
    value = parse_number(match["number"])
    return None if value is None else value * _MULTIPLES[match["unit"]]


def _same_value(given: Fraction, answer: str, expected: Fraction, reference: str) -> bool:
    if given == expected:
        return True
    if answer.endswith("%") != reference.endswith("%"):
        return given == 100 * expected if answer.endswith("%") else 100 * given == expected
    return is_rounded(given, answer, expected, reference)
