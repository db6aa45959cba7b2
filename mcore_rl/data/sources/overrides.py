"""What a row asks for instead of the run's keys: how its responses are drawn, and how many turns it may take."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mcore_rl.config.fields import DOMAIN
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import DataError

SAMPLING = ("temperature", "top_p", "top_k", "max_response_tokens")
"""Keys of rollout that a row may set for itself."""
_WHOLE = ("top_k", "max_response_tokens")
_MOST_DIGITS = 10
_DOMAINS = {field.name: field.metadata[DOMAIN] for field in fields(RolloutConfig) if field.name in SAMPLING}


def check_sampling(given: Mapping[str, Any], rollout: RolloutConfig, where: str) -> dict[str, float] | None:
    """Those of SAMPLING that a row sets, whole numbers as int; None where it sets none. A null is not set, as a column
    of structs has every field in every row.

    Raises: DataError for another name, or a value that the run's key could not have, or beyond the run's limit.
    """
    checked: dict[str, float] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name not in SAMPLING:
            near = difflib.get_close_matches(name, SAMPLING, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise DataError(f"{where}: sampling has {name!r}; {hint}It may set {', '.join(SAMPLING)}")
        checked[name] = _number(name, value, f"{where}: sampling.{name}")
        if name == "max_response_tokens" and checked[name] > rollout.max_response_tokens:
            raise DataError(
                f"{where}: sampling.{name} is {value}, above rollout.{name}={rollout.max_response_tokens}, for which "
                f"engines and batches are laid out; raise rollout.{name}, or lower the row's"
            )
    return checked or None


def check_turns(value: Any, where: str) -> int | None:
    """The most turns of a row's episodes; None where it sets none.

    Raises: DataError for what is not a whole number above 0.
    """
    if value is None:
        return None
    turns = _whole(value)
    if turns is None or turns < 1:
        raise DataError(f"{where}: max_turns is {value!r}, not a whole number above 0")
    return turns


def _number(name: str, value: Any, told: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{told} is {value!r}, not a number")
    if not math.isfinite(value):
        raise DataError(f"{told} is {value}, not a finite number")
    number: float | None = _whole(value) if name in _WHOLE else value
    if number is None:
        raise DataError(f"{told} is {value}, not a whole number")
    if (demand := _DOMAINS[name].demand(number)) is not None:
        raise DataError(f"{told} is {value}, but must be {demand}")
    return number


def _whole(value: Any) -> int | None:
    """A whole number, however it is written: a flat file has text, a column with nulls in it often floats."""
    if isinstance(value, str):
        text = value.strip()
        return int(text) if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else None
