"""Runs a data set's tests in the form that the set has; runs inside the sandbox."""

from __future__ import annotations

import inspect
import io
import types
import unittest
from collections.abc import Mapping
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
            import asyncio

            asyncio.run(outcome)
    elif not entry and request["collect"]:
        _collect(names)


def _collect(names: Mapping[str, Any]) -> None:
    number = 0
    for name, value in list(names.items()):
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            number += _run_case(value)
        elif isinstance(value, type) and name.startswith("Test"):
            number += sum(_run(value, method) for method in dir(value) if method.startswith("test"))
        elif inspect.isfunction(value) and name.startswith("test"):
            value()
            number += 1
    if not number:
        raise AssertionError("the tests define no test function")


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
