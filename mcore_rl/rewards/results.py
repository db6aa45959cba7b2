"""Conversion of reward functions' results to scores: a number, or a dict with `score`, optional `acc`, and parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Real

from mcore_rl.config.reward import TAKEN
from mcore_rl.types import Score

MAX_MESSAGE_CHARS = 300
MAX_PART_CHARS = 2000


class NotApplicable(Score):
    """Score of a result None: the function does not apply. It is an error unless another function applies."""


def score_of(result: object) -> Score:
    """Convert the result of a user's function: a number, or a dict with `score`, optional `acc`, and parts.

    Other and non-finite results become Score.error. None, or a dict whose score is None, becomes NotApplicable.
    """
    found = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in found:
        return failed(f"the reward function returned a dict without score: {_shown(result)}")
    if found["score"] is None:
        return NotApplicable(0.0, 0.0, "the reward function returned None instead of a finite number or a dict")
    reward = _number(found["score"])
    if reward is None and found is not result:
        return failed(f"the reward function returned {_shown(result)} instead of a finite number or a dict")
    if reward is None:
        return failed(f"the reward function returned score {_shown(found['score'])} instead of a finite number")
    accuracy = reward if found.get("acc") is None else _number(found["acc"])
    if accuracy is None:
        return failed(f"the reward function returned acc {_shown(found['acc'])} instead of a finite number")
    return Score(reward, accuracy, parts=_parts(found))


def scores_of(results: object, count: int) -> list[Score]:
    """Convert the results of a batch function for `count` responses.

    If `results` is not a sequence of that length, every score is an error.
    """
    # Arrays and tensors are no Sequences. One without dimensions is a single number.
    is_array = hasattr(results, "tolist") and getattr(results, "ndim", None) != 0
    values = list(results) if is_array and isinstance(results, Iterable) else results
    if not isinstance(values, Sequence) or isinstance(values, str):
        return [failed(f"the reward function returned {_shown(results)} instead of a list of {count} results")] * count
    if len(values) != count:
        return [failed(f"the reward function returned {len(values)} results for {count} responses")] * count
    return [score_of(value) for value in values]


def failed(message: str, traceback: str | None = None) -> Score:
    """Return the score of a response whose grading failed."""
    return Score(0.0, 0.0, message[:MAX_MESSAGE_CHARS], traceback)


def _parts(result: Mapping[object, object]) -> dict[str, float | str]:
    """Return the dict's other entries: finite numbers as they are, other values as text, without None."""
    parts: dict[str, float | str] = {}
    for key, value in result.items():
        if key in ("score", "acc") or value is None:
            continue
        name, number = _as_text(key), _number(value)
        parts[f"{name}_part" if name in TAKEN else name] = _as_text(value) if number is None else number
    return parts


def _as_text(value: object) -> str:
    """Return a value as text of at most MAX_PART_CHARS. Lone surrogates are escaped: UTF-8 cannot encode them."""
    text = value if isinstance(value, str) else _repr(value)
    return text[:MAX_PART_CHARS].encode("utf-8", "backslashreplace").decode("utf-8")


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # a user's class may raise anything; int raises for more than 4,300 digits
        return f"<{type(value).__name__}>"


def _number(value: object) -> float | None:
    """Return a finite number; None for anything else. Arrays and tensors of one element count as that element."""
    value = _element(value)
    # Real includes bool and the numbers of NumPy.
    if not isinstance(value, Real | Decimal):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):  # an integer above the float range; a signalling NaN
        return None
    return number if math.isfinite(number) else None


def _element(value: object) -> object:
    item = getattr(value, "item", None)
    if isinstance(value, Real) or not callable(item):
        return value
    try:
        return item()
    except Exception:  # more than one element; each array library raises its own type
        return value


def _shown(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {_repr(value)[:80]}"
