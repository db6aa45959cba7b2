"""Arguments of test functions as pytest provides them. Runs inside the sandbox."""

from __future__ import annotations

import collections
import inspect
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Output = collections.namedtuple("Output", ["out", "err"])
"""Text of a test on standard output and standard error."""


class UnknownFixture(Exception):
    """A test has a parameter that neither the tests nor this file define, such as monkeypatch."""


class Captured:
    """Substitute for pytest's capsys."""

    def __init__(self) -> None:
        self._out, self._err = io.StringIO(), io.StringIO()

    def readouterr(self) -> Output:
        """Return the text since the last call."""
        texts = self._out.getvalue(), self._err.getvalue()
        for stream in (self._out, self._err):
            stream.seek(0)
            stream.truncate()
        return Output(*texts)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace the standard streams."""
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self._out, self._err
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


class Fixtures:
    """Values for one call of a test. names: module of the tests; instance: object of the test class, if any."""

    def __init__(self, names: Mapping[str, object], instance: object = None) -> None:
        self.captured = Captured()
        self._names, self._instance = names, instance
        self._values: dict[str, object] = {}
        self._open: list[Iterator[object]] = []

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

    def close(self) -> None:
        """Resume generator fixtures after their yield, in reverse order."""
        for generator in reversed(self._open):
            next(generator, None)

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
        self._open.append(value)
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
