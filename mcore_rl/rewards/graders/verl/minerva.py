r"""Minerva's normalization of final answers, which verl.utils.reward_score.math_dapo compares as text.

Source: Lewkowycz et al., arXiv 2206.14858, appendix D.1, with its lists of replaced and removed expressions.
"""

from __future__ import annotations

import re

from mcore_rl.rewards.graders.math_dapo import MISSING_ANSWER
from mcore_rl.rewards.graders.verl.boxes import last_braced_box, remove_boxed

BOX_TAIL_CHARS = 100
"""Length of the end of a response that is searched for a box with strict_box_verify."""
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
_IN_DOLLARS = re.compile(r"(.*?)\$(.*?)\$(.*)")
_COMMANDS = tuple(re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline"))
_BOX = re.compile(r"\\boxed\{(.*)\}")
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")
ANSWER_PATTERN = r"(?i)Answer\s*:\s*([^\n]+)"


def normalize_final_answer(final_answer: str) -> str:
    r"""Return the normal form: the last side of an equation without words, units, spaces, and fonts."""
    answer = final_answer.rpartition("=")[2]
    for before, after in SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for expression in REMOVED_EXPRESSIONS:
        answer = answer.replace(expression, "")
    answer = _IN_DOLLARS.sub(r"$\2$", answer)
    for command in (*_COMMANDS, _BOX):
        answer = command.sub(r"\1", answer)
    answer = _SHORT_FRACTION.sub(r"frac{\1}{\2}", answer)
    answer = _SHORT_ROOT.sub(r"sqrt{\1}", answer).replace("$", "")
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
    if pause_tokens_index is not None:
        if len(pause_tokens_index) != 4:
            raise AssertionError(f"pause_tokens_index has {len(pause_tokens_index)} entries, not 4")
        tail = pred[pause_tokens_index[-1] - BOX_TAIL_CHARS :]
    else:
        tail = pred[-BOX_TAIL_CHARS:]
    box = last_braced_box(tail)
    prediction = MISSING_ANSWER if box is None else remove_boxed(box)
    return prediction == gt, prediction


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str]:
    """Return whether a solution is correct, and its prediction."""
    if strict_box_verify:
        return is_correct_strict_box(solution_str, answer, pause_tokens_index)
    return is_correct_minerva(solution_str, answer)
