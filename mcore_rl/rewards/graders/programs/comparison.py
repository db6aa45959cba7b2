"""Comparison of a program's outputs and results with the expected ones, in the grading process."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from typing import Any

from mcore_rl.rewards.graders.programs.truths import as_text

RELATIVE, ABSOLUTE = 1e-5, 1e-8
_MISSING = object()  # equals no result; None is a value


def same_output(printed: str, expected: object) -> bool:
    """Compare an output with the expected one (see as_text), ignoring empty lines, spaces around lines, and the last
    digits of decimals."""
    texts = printed, as_text(expected)
    ours, theirs = ([line.strip() for line in text.splitlines() if line.strip()] for text in texts)
    if len(ours) != len(theirs):
        return False
    return all(one == other or _same_words(one.split(), other.split()) for one, other in zip(ours, theirs, strict=True))


def same_result(printed: str, expected: object) -> bool:
    """Return whether the last printed line is the expected value as JSON.

    Some data sets nest expected values in a list (APPS) or write them as JSON or Python text.
    """
    try:
        returned = json.loads(printed.rstrip().rpartition("\n")[2])
        wanted = [_as_json(expected)]
        if isinstance(wanted[0], list) and len(wanted[0]) == 1:
            wanted += wanted[0]  # APPS; in TACO, the element is text
        wanted += [_parsed(each) for each in wanted if isinstance(each, str)]
        return any(same_value(returned, each) for each in wanted)
    except (ValueError, OverflowError, RecursionError):
        return False


def same_value(one: object, other: object) -> bool:
    """Compare JSON values: decimals within a tolerance, integers exactly.

    Raises: RecursionError; OverflowError for an integer beyond the range of floats.
    """
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, float) or isinstance(other, float):
        if not (isinstance(one, int | float) and isinstance(other, int | float)):
            return False
        return one == other or math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return bool(one == other)


def _parsed(text: str) -> object:
    for read in (json.loads, ast.literal_eval):
        try:
            return _as_json(read(text))
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return _MISSING


def _as_json(value: object) -> Any:
    """Return the value after a round trip through JSON: tuples and arrays become lists, keys become text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {_key(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_as_json, value))
    return [_as_json(each) for each in value] if isinstance(value, list | tuple) else value


def _key(key: object) -> str:
    if isinstance(key, str):
        return key
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else str(key)


def _same_words(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) and all(
        one == other or _close(one, other) for one, other in zip(ours, theirs, strict=True)
    )


def _close(one: str, other: str) -> bool:
    if not any(mark in one + other for mark in ".eE") or "_" in one + other:
        return False  # integers are compared exactly; float() would parse 1_0 as 10
    try:
        return math.isclose(float(one), float(other), rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except ValueError:
        return False
