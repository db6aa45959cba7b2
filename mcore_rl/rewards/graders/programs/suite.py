"""Runs a data set's tests in the form that the set has; runs inside the sandbox."""

from __future__ import annotations

import asyncio
import inspect
import io
import types
import unittest
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcore_rl.rewards.graders.programs.peer import Remote


def run_suite(request: Mapping[str, Any], space: types.ModuleType) -> None:
    """Runs statements, then `check(entry point)`, or test functions as pytest finds them.

    Raises: whatever a failed test raises.
    """
    names = space.__dict__
    entry = request.get("entry_point")
    if entry:
        names["candidate"] = eval(str(entry), names)
        if isinstance(names["candidate"], Remote):
            vars(names["candidate"])["_guarded"] = False  # it is what the tests call
    names["__name__"] = "tests"
    for number, statement in enumerate(request["statements"]):
        exec(compile(str(statement), f"test_{number}.py", "exec"), names)
    if entry and callable(names.get("check")):
        outcome = names["check"](names["candidate"])
        if inspect.iscoroutine(outcome):
            asyncio.run(outcome)
    elif request["collect"]:
        _collect(names)


def _collect(names: Mapping[str, Any]) -> None:
    number = 0
    for name, value in list(names.items()):
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            number += _run_case(value)
        elif isinstance(value, type) and name.startswith("Test"):
            number += sum(_run(value, method) for method in dir(value) if method.startswith("test"))
        elif inspect.isfunction(value) and name.startswith("test"):
            number += _run_function(value)
    if not number:
        raise AssertionError("the tests define no test function")


def _run_function(function: Callable[..., Any]) -> int:
    """Runs it with every combination of its pytest parameters."""
    calls: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            sets = [dict(zip(names, _values(value, len(names)))) for value in values]  # noqa: B905 (Python 3.9)
            calls = [{**call, **each} for call in calls for each in sets]
    for call in calls:
        outcome = function(**call)
        if inspect.iscoroutine(outcome):
            asyncio.run(outcome)
    return len(calls)


def _values(value: Any, count: int) -> Sequence[Any]:
    values = getattr(value, "values", None)  # of pytest.param
    if isinstance(values, tuple):
        return values
    return [value] if count == 1 else list(value)


def _run(kind: type, method: str) -> int:
    instance = kind()
    for name in ("setup_method", "setUp"):
        if hasattr(instance, name):
            setup = getattr(instance, name)
            setup(*([None] if inspect.signature(setup).parameters else []))
    getattr(instance, method)()
    return 1


def _run_case(kind: type[unittest.TestCase]) -> int:
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(kind)
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    if not result.wasSuccessful():
        raise AssertionError("a test case failed")
    return result.testsRun
