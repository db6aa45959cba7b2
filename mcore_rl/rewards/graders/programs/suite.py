"""Execution of a data set's tests: statements, `check` functions, pytest tests, unittest cases. Runs in the sandbox."""

from __future__ import annotations

import asyncio
import inspect
import io
import types
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mcore_rl.rewards.graders.programs.fixtures import Fixtures
from mcore_rl.rewards.graders.programs.peer import RemoteObject

_SETUPS = ("setup_method", "setUp")


def run_suite(request: Mapping[str, Any], space: types.ModuleType) -> None:
    """Run the statements, then `check(entry point)` or the test functions that pytest would collect.

    Raises: the exception of a failed test.
    """
    names = space.__dict__
    entry = request.get("entry_point")
    if entry:
        names["candidate"] = eval(str(entry), names)
        if isinstance(names["candidate"], RemoteObject):
            vars(names["candidate"])["_guarded"] = False  # the tests call it with arguments
    names["__name__"] = "tests"
    for number, statement in enumerate(request["statements"]):
        exec(compile(str(statement), f"test_{number}.py", "exec"), names)
    check = names.get("check")
    if entry and callable(check):
        outcome = check(names["candidate"])
        if inspect.iscoroutine(outcome):
            asyncio.run(outcome)
    elif request["collect"]:
        _collect(names)


def _collect(names: Mapping[str, object]) -> None:
    number = 0
    _call_if_defined(names.get("setup_module"))
    for name, value in list(names.items()):
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            number += _run_case(value)
        elif isinstance(value, type) and name.startswith("Test"):
            number += _run_class(value, names)
        elif inspect.isfunction(value) and name.startswith("test"):
            number += _run_function(value, names)
    if not number:
        raise AssertionError("the tests define no test function")


def _run_class(kind: type, names: Mapping[str, object]) -> int:
    """Run the test methods of a class, each with a new instance; return the number of tests."""
    number = 0
    _call_if_defined(getattr(kind, "setup_class", None))
    for method in dir(kind):
        if method.startswith("test"):
            number += _run_function(getattr(kind, method), names, kind, method)
    return number


def _run_function(
    function: Callable[..., object], names: Mapping[str, object], kind: type | None = None, method: str = ""
) -> int:
    """Run a test with every combination of its pytest parameters; return their number.

    kind, method: class and name of a test method.
    """
    calls = _parameters([*getattr(kind, "pytestmark", []), *getattr(function, "pytestmark", [])])
    for call in calls:
        instance = None if kind is None else kind()
        test = function if kind is None else getattr(instance, method)
        setups = [names.get("setup_function")] if kind is None else [getattr(instance, each, None) for each in _SETUPS]
        fixtures = Fixtures(names, instance)
        with fixtures.captured.active():
            for setup in setups:
                _call_if_defined(setup)
            fixtures.use_automatic()
            outcome = test(**fixtures.arguments(test, call))
            if inspect.iscoroutine(outcome):
                asyncio.run(outcome)
            fixtures.close()
    return len(calls)


def _parameters(marks: Iterable[Any]) -> list[dict[str, object]]:
    """Return the arguments of every call that the parametrize marks define."""
    calls: list[dict[str, object]] = [{}]
    for mark in marks:
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            sets = [dict(zip(names, _values(value, len(names)))) for value in values]  # noqa: B905 (Python 3.9)
            calls = [{**call, **each} for call in calls for each in sets]
    return calls


def _values(value: Any, count: int) -> Sequence[object]:
    values = getattr(value, "values", None)  # of pytest.param
    if isinstance(values, tuple):
        return values
    return [value] if count == 1 else list(value)


def _call_if_defined(setup: object) -> None:
    """Call an xunit-style setup function with None for its parameter (the next test), if it has one."""
    if callable(setup):
        setup(*([None] if inspect.signature(setup).parameters else []))


def _run_case(kind: type[unittest.TestCase]) -> int:
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(kind)
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    if not result.wasSuccessful():
        raise AssertionError("a test case failed")
    return result.testsRun
