"""Conversion of the return values of users' tools to ToolResult."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from mcore_rl.data.json_text import as_json_text
from mcore_rl.rollout.tools.interface import ToolError, ToolResult


def as_text(result: Any) -> str:
    """Return text for the model: a string as it is, other values as JSON."""
    try:
        return as_json_text(result)
    except (TypeError, ValueError, RecursionError):
        return _shown(result)


def _shown(result: Any) -> str:
    try:
        return str(result)
    except (ValueError, RecursionError):  # an integer with more than 4,300 digits, or deeply nested lists
        return f"the tool returned a {type(result).__name__} that is too large or too deeply nested to be shown"


def result_of(result: Any) -> ToolResult:
    """Convert the return value of execute: a response, optionally with reward and metrics (either may be None).

    Raises: ToolError for images and videos.
    """
    parts = result if isinstance(result, tuple) and result else (result,)
    response, reward, metrics = (*parts, None, None)[:3]
    for kind in ("image", "video"):
        if getattr(response, kind, None):
            raise ToolError(f"the tool returned {kind}s, but only text is supported")
    text = response.text or "" if hasattr(response, "text") else "" if response is None else as_text(response)
    return ToolResult(text, number_of(reward), dict(metrics) if isinstance(metrics, Mapping) else {})


def result_of_function(result: Any) -> ToolResult:
    """Convert the return value of a function: a ToolResponse, optionally with reward and metrics, or any other
    value."""
    response = result[0] if isinstance(result, tuple) and result else result
    return result_of(result) if hasattr(response, "text") else ToolResult(as_text(result))


def number_of(value: Any) -> float | None:
    if value is None:
        return None
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real) or not math.isfinite(value):
        raise TypeError(f"the reward is {value!r} instead of a finite number or None")
    return float(value)
