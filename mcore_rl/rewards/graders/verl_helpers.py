r"""Reimplementation of verl's scoring helpers, from their documented behaviour, for users' files that import them.

Sources: Hendrycks et al., arXiv 2103.03874, for the normal form of MATH answers (verl's math_reward); Lewkowycz et al.,
arXiv 2206.14858, appendix D.1, for Minerva's normal form with its lists of replaced and removed expressions (verl's
math_dapo); Jin et al., arXiv 2503.09516, for checks of short answers (verl's search_r1_like_qa_em).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mcore_rl.rewards.graders.data_sets import MISSING_ANSWER, last_answer, normal_form

BOX, BARE_BOX = "\\boxed{", "\\boxed "
BOX_TAIL_CHARS = 100
"""Length of the end of a response that is searched for a box with strict_box_verify."""
ANSWER_PATTERN = r"(?i)Answer\s*:\s*([^\n]+)"
SUBSTITUTIONS = [
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", "")),
    *(("mbox", "text"), (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
]
REMOVED_EXPRESSIONS = [
    *"square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents".split(),
    *"degrees cm gm pounds meters meals edges students childrentickets multiples \\text{s} \\text{.}".split(),
    *("\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}"),
    *("\\;", ",\\!", "{,}", '"', "\\dots"),
]
_SHORT_FRACTION = re.compile(r"\\frac([^{])(\{|[^{])")
_CUT_FRACTION = re.compile(r"\\frac[^{]?$")
_SHORT_ROOT = re.compile(r"\\sqrt([^{])")
_RATIO = re.compile(r"(-?(?:0|[1-9][0-9]*))/(-?(?:0|[1-9][0-9]*))")
_REPLACED = (
    *(("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", "")),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
)
_UNIT = "\\text{ "
_MINERVA_REWRITES = (
    (re.compile(r"(.*?)\$(.*?)\$(.*)"), r"$\2$"),
    *((re.compile(rf"\\{name}\{{(.*?)\}}"), r"\1") for name in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


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
    content = box_content(s)
    if content is None:
        raise AssertionError(f"not a box: {s}")
    return content


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


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Return whether two answers have the same normal form. A missing answer equals only a missing answer."""
    if str1 is None or str2 is None:
        return str1 is str2
    try:
        forms = strip_string(str1), strip_string(str2)
    except Exception:  # answers without a normal form, for example with two units
        return str1 == str2
    if verbose:
        print(*forms)
    return forms[0] == forms[1]


def strip_string(string: str) -> str:
    r"""Return the normal form of an answer: `\dfrac12`, `1/2` and `0.5` are `\frac{1}{2}`.

    Raises: AssertionError for an answer with two units.
    """
    for before, after in _REPLACED:
        string = string.replace(before, after)
    string = remove_right_units(string).replace("\\%", "").replace("%", "")
    string = string.replace(" .", " 0.").replace("{.", "{0.")
    if string.startswith("."):
        string = f"0{string}"
    name, equals, value = string.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        string = value
    string = fix_fracs(fix_sqrt(string).replace(" ", ""))
    return "\\frac{1}{2}" if string == "0.5" else fix_a_slash_b(string)


def fix_fracs(string: str) -> str:
    r"""Write `\frac12` and `\frac1{2}` as `\frac{1}{2}`."""
    if _CUT_FRACTION.search(string):
        return string
    return _SHORT_FRACTION.sub(
        lambda match: rf"\frac{{{match[1]}}}" + ("{" if match[2] == "{" else f"{{{match[2]}}}"), string
    )


def fix_a_slash_b(string: str) -> str:
    r"""Write a ratio of integers, such as `1/2`, as `\frac{1}{2}`; return any other text unchanged."""
    match = _RATIO.fullmatch(string)
    return string if match is None else rf"\frac{{{match[1]}}}{{{match[2]}}}"


def fix_sqrt(string: str) -> str:
    r"""Write `\sqrt3` as `\sqrt{3}`."""
    return _SHORT_ROOT.sub(r"\\sqrt{\1}", string)


def remove_right_units(string: str) -> str:
    r"""Remove the unit of an answer, such as `\text{ cm}`.

    Raises: AssertionError for an answer with two units.
    """
    body, *units = string.split(_UNIT)
    if len(units) > 1:
        raise AssertionError(f"more than one unit: {string}")
    return body


def normalize_final_answer(final_answer: str) -> str:
    r"""Return the normal form: the last side of an equation without words, units, spaces, and fonts."""
    answer = final_answer.rpartition("=")[2]
    for before, after in SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for expression in REMOVED_EXPRESSIONS:
        answer = answer.replace(expression, "")
    for pattern, replacement in _MINERVA_REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = ANSWER_PATTERN
) -> tuple[bool, str]:
    """Return whether the last `Answer:` has the reference's normal form, and the answer's normal form."""
    found = re.findall(answer_pattern, solution_str)
    prediction = normalize_final_answer(found[-1] if found else MISSING_ANSWER)
    reference = remove_boxed(last_braced_box(gt) or "") if gt_need_extract else gt
    return prediction == normalize_final_answer(reference), prediction


def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: list[int] | None = None) -> tuple[bool, str]:
    """Return whether the content of the last box near the end equals the reference exactly, and the content."""
    if pause_tokens_index is not None and len(pause_tokens_index) != 4:
        raise AssertionError(f"pause_tokens_index has {len(pause_tokens_index)} entries, not 4")
    start = (0 if pause_tokens_index is None else pause_tokens_index[-1]) - BOX_TAIL_CHARS
    box = last_braced_box(pred[start:])
    prediction = MISSING_ANSWER if box is None else remove_boxed(box)
    return prediction == gt, prediction


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str]:
    """Return whether a solution is correct, and its prediction."""
    if strict_box_verify:
        return is_correct_strict_box(solution_str, answer, pause_tokens_index)
    return is_correct_minerva(solution_str, answer)


def em_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    """Return 1 if prediction and any answer have the same normal form, else 0."""
    return int(normal_form(prediction) in _normal_forms(golden_answers))


def subem_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    """Return 1 if the prediction's normal form contains the normal form of any answer, else 0."""
    text = normal_form(prediction)
    return int(any(answer in text for answer in _normal_forms(golden_answers)))


def extract_solution(solution_str: str) -> str | None:
    """Return the stripped content of the last <answer>...</answer>, or None."""
    answer = last_answer(solution_str)
    return None if answer is None else answer.strip()


def count_answer_tags(text: str) -> tuple[int, int]:
    """Return the numbers of <answer> and </answer>."""
    return text.count("<answer>"), text.count("</answer>")


def compute_score_subem(
    solution_str: str,
    ground_truth: Mapping[str, str | Sequence[str]],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for an answer that contains a reference, `format_score` for another answer, 0 without one."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    return score if subem_check(answer, ground_truth["target"]) else format_score


def _normal_forms(answers: str | Sequence[str]) -> list[str]:
    return [normal_form(answer) for answer in ([answers] if isinstance(answers, str) else answers)]
