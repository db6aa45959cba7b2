"""Options of single rows that override the run's keys: sampling options and the number of turns."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import cast

from mcore_rl.config.fields import DOMAIN
from mcore_rl.config.rules.changed_keys import written
from mcore_rl.config.rules.rollout import stop_fault, untrainable
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import DataError
from mcore_rl.types import SamplingOptions, SamplingOverrides

SAMPLING = ("temperature", "top_p", "top_k", "max_response_tokens", "stop")
"""Keys of `rollout` that a row or a call of session.generate may override."""
CHANGES_DISTRIBUTION = (
    *("min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words"),
    *("bad_words_ids", "allowed_token_ids", "min_tokens", "min_new_tokens", "logits_processors", "structured_outputs"),
)
"""Engine options that are always rejected: they change the sampling distribution."""
_WHOLE = ("top_k", "max_response_tokens")
# No option needs more digits, and int() takes quadratic time for a long text.
_MOST_DIGITS = 10
_DOMAINS = {field.name: field.metadata[DOMAIN] for field in fields(RolloutConfig) if field.name in SAMPLING}


def check_sampling(
    given: Mapping[str, object], where: str, *, trained: bool, max_response_tokens: int | None = None
) -> SamplingOverrides | None:
    """Check the sampling options of a row or call. Returns them (whole numbers as int, stop strings as a list) or None.

    A null counts as absent, because Arrow structs have all fields in every row.

    trained: whether responses are trained on; their tokens must then come from the distribution that the trainer
    computes.
    max_response_tokens: the run's limit, which the row must not exceed; None: not checked.

    Raises: DataError for an unknown name, a value that the run's key does not allow, or a value above the run's limit.
    """
    values = {name: _checked(name, value, where) for name, value in given.items() if value is not None}
    checked = cast(SamplingOverrides, values)
    if max_response_tokens is not None and checked.get("max_response_tokens", 0) > max_response_tokens:
        raise DataError(
            f"{where}: sampling.max_response_tokens is {given['max_response_tokens']}, above "
            f"rollout.max_response_tokens={max_response_tokens}, which sizes engines and batches; raise "
            "rollout.max_response_tokens, or lower the row's value"
        )
    temperature, top_p, top_k = checked.get("temperature", 1.0), checked.get("top_p", 1.0), checked.get("top_k", -1)
    if trained and (found := untrainable(temperature=temperature, top_p=top_p, top_k=top_k)) is not None:
        name, reason = found
        raise DataError(f"{where}: sampling.{name} is {given[name]}, which {reason}, or remove it")
    return checked or None


def with_overrides(options: SamplingOptions, wanted: SamplingOverrides) -> SamplingOptions:
    """Apply checked options of a row or call. Greedy sampling (validation, baselines) stays greedy."""
    return SamplingOptions(
        max_response_tokens=wanted.get("max_response_tokens", options.max_response_tokens),
        temperature=wanted.get("temperature", options.temperature) if options.temperature > 0 else 0.0,
        top_p=wanted.get("top_p", options.top_p),
        top_k=wanted.get("top_k", options.top_k),
        stop=tuple(wanted.get("stop", options.stop)),
    )


def _checked(name: str, value: object, where: str) -> float | list[str]:
    context = f"{where}: sampling.{name}"
    if name in CHANGES_DISTRIBUTION:
        raise DataError(f"{context} changes the sampling distribution, which the trainer does not model; remove it")
    if name not in SAMPLING:
        near = difflib.get_close_matches(name, SAMPLING, n=1)
        hint = f"did you mean {near[0]}? It" if near else "it"
        raise DataError(f"{where}: sampling has {name!r}; {hint} may set {', '.join(SAMPLING)}")
    if name == "stop":
        return _stops(value, context)
    number = _number(name, value, context)
    if name == "top_k" and number == 0:
        raise DataError(f"{context} is 0, which leaves no token; set it to -1 (all tokens) or to at least 1")
    return number


def _stops(value: object, context: str) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if (fault := stop_fault(stops)) is not None or not isinstance(stops, list | tuple):
        raise DataError(f"{context} is {written(value)}, which {fault}")
    return list(stops)


def check_turns(value: object, where: str) -> int | None:
    """Read the maximum number of turns of a row's episodes; None if the row does not set it.

    Raises: DataError unless it is a whole number above 0.
    """
    if value is None:
        return None
    turns = _whole(value)
    if turns is None or turns < 1:
        raise DataError(f"{where}: max_turns is {value!r}, not a whole number above 0")
    return turns


def _number(name: str, value: object, context: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{context} is {value!r}, not a number")
    if not math.isfinite(value):
        raise DataError(f"{context} is {value}, not a finite number")
    number: float | None = _whole(value) if name in _WHOLE else value
    if number is None:
        raise DataError(f"{context} is {value}, not a whole number")
    if (demand := _DOMAINS[name].violation(number)) is not None:
        raise DataError(f"{context} is {value}, but must be {demand}")
    return number


def _whole(value: object) -> int | None:
    """Parse a whole number; CSV files have text, and columns with nulls often have floats. None if it is not whole."""
    if isinstance(value, str):
        text = value.strip()
        return int(text) if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else None
