"""What a tool of a user's returned, as the outcome of a call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from mcore_rl.data.json_text import as_json_text
from mcore_rl.rollout.tools.interface import Outcome, ToolError


def as_text(result: Any) -> str:
    """Text for the model: a string as it is, anything else as JSON."""
    try:
        return as_json_text(result)
    except (TypeError, ValueError, RecursionError):
        return _shown(result)


def _shown(result: Any) -> str:
    try:
        return str(result)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits; a list in lists in lists
        return f"the tool returned a {type(result).__name__} that is too large or nested too deeply to be shown"


def outcome_of(result: Any) -> Outcome:
    """Of what execute returned: a response, or one with reward and metrics, either of which may be None.

    Raises: ToolError for images and videos.
    """
    parts = result if isinstance(result, tuple) and result else (result,)
    response, reward, metrics = (*parts, None, None)[:3]
    for kind in ("image", "video"):
        if getattr(response, kind, None):
            raise ToolError(f"the tool answered with {kind}s, and only text can be shown")
    text = response.text or "" if hasattr(response, "text") else "" if response is None else as_text(response)
    return Outcome(text, number_of(reward), dict(metrics) if isinstance(metrics, Mapping) else {})


def outcome_of_function(result: Any) -> Outcome:
    """Of what a function with verl's decorator returned: a ToolResponse, alone or with reward and metrics, or what any
    other function returns."""
    response = result[0] if isinstance(result, tuple) and result else result
    return outcome_of(result) if hasattr(response, "text") else Outcome(as_text(result))


def number_of(value: Any) -> float | None:
    if value is None:
        return None
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real) or not math.isfinite(value):
        raise TypeError(f"the reward is {value!r} instead of a finite number or None")
    return float(value)
