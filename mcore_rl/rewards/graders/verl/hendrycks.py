r"""Normalization of MATH answers for comparison as text.

Source: Hendrycks et al., arXiv 2103.03874, whose evaluation defines the normal form. The names are from
verl.utils.reward_score.math_reward.
"""

from __future__ import annotations

import re

_SHORT_FRACTION = re.compile(r"\\frac([^{])(\{|[^{])")
_CUT_FRACTION = re.compile(r"\\frac[^{]?$")
_SHORT_ROOT = re.compile(r"\\sqrt([^{])")
_RATIO = re.compile(r"(-?(?:0|[1-9][0-9]*))/(-?(?:0|[1-9][0-9]*))")
_REMOVED = ("\n", "\\!")
_WITHOUT_MEANING = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
_UNIT = "\\text{ "


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
    for text in _REMOVED:
        string = string.replace(text, "")
    string = string.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for text in _WITHOUT_MEANING:
        string = string.replace(text, "")
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
