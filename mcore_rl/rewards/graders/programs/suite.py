"""Execution of a data set's tests: statements, `check` functions, pytest tests, unittest cases. Runs in the sandbox.

Test functions get the arguments that pytest would provide: parameters, tmp_path, tmpdir, capsys, and own fixtures.
"""

from __future__ import annotations

import asyncio
import collections
import inspect
import io
import types
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Any

from mcore_rl.rewards.graders.programs.peer import RemoteObject
from mcore_rl.rewards.graders.programs.prelude import take

_SETUPS = ("setup_method", "setUp")
Output = collections.namedtuple("Output", ["out", "err"])
"""Text of a test on standard output and standard error."""


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
    # not "__main__", under which test files run themselves
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
        with redirect_stdout(fixtures.captured.out), redirect_stderr(fixtures.captured.err):
            for setup in setups:
                _call_if_defined(setup)
            fixtures.use_automatic()
            outcome = test(**fixtures.arguments(test, call))
            if inspect.iscoroutine(outcome):
                asyncio.run(outcome)
            fixtures.teardown.close()  # not after a failed test, which ends the suite
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


class UnknownFixture(Exception):
    """A test has a parameter that neither the tests nor this file define, such as monkeypatch."""


class Captured:
    """Substitute for pytest's capsys: the text on the streams `out` and `err`."""

    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()

    def readouterr(self) -> Output:
        """Return the text since the last call."""
        return Output(take(self.out), take(self.err))


class Fixtures:
    """Values for one call of a test. names: module of the tests; instance: object of the test class, if any."""

    def __init__(self, names: Mapping[str, object], instance: object = None) -> None:
        self.captured = Captured()
        self._names, self._instance = names, instance
        self._values: dict[str, object] = {}
        self.teardown = ExitStack()
        """Resumes generator fixtures after their yield, in reverse order."""

    def arguments(self, function: Callable[..., object], given: Mapping[str, object]) -> dict[str, object]:
        """Return an argument for every parameter without a default. given: arguments from parametrize.

        Raises: UnknownFixture.
        """
        parameters = inspect.signature(function).parameters.values()
        wanted = [each.name for each in parameters if each.default is each.empty and each.name != "self"]
        return {**given, **{name: self._value(name) for name in wanted if name not in given}}

    def use_automatic(self) -> None:
        """Evaluate the fixtures that are marked autouse."""
        for name, value in list(self._names.items()):
            if _fixture(value) is not None and _option(value, "autouse"):
                self._value(name)

    def _value(self, name: str) -> object:
        if name not in self._values:
            self._values[name] = self._made(name)
        return self._values[name]

    def _made(self, name: str) -> object:
        defined = getattr(type(self._instance), name, None) or self._names.get(name)
        function = _fixture(defined)
        if function is not None:
            return self._called(function, "self" in inspect.signature(function).parameters, defined)
        if name in ("tmp_path", "tmpdir"):
            import pathlib
            import tempfile

            return pathlib.Path(tempfile.mkdtemp())
        if name == "capsys":
            return self.captured
        raise UnknownFixture(name)

    def _called(self, function: Callable[..., object], bound: bool, defined: object) -> object:
        if _option(defined, "params"):
            raise UnknownFixture(f"{function.__name__} (with params)")
        arguments = {**({"self": self._instance} if bound else {}), **self.arguments(function, {})}
        value = function(**arguments)
        if not inspect.isgenerator(value):
            return value
        self.teardown.callback(next, value, None)
        return next(value)


def _fixture(value: object) -> Callable[..., object] | None:
    """Return the function below @pytest.fixture, or None for any other value; old and new pytest differ."""
    if type(value).__name__ == "FixtureFunctionDefinition" and hasattr(value, "_get_wrapped_function"):
        return value._get_wrapped_function()  # type: ignore[no-any-return]
    inner = vars(value).get("__pytest_wrapped__") if inspect.isfunction(value) else None
    return getattr(inner, "obj", None)


def _option(value: object, name: str) -> object:
    marker = getattr(value, "_fixture_function_marker", None) or getattr(value, "_pytestfixturefunction", None)
    return getattr(marker, name, None)
