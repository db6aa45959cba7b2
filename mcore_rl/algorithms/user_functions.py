"""Functions that users bring, named `module_or_file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_rl.errors import ConfigError


def is_function_spec(name: str) -> bool:
    """Whether `name` names a function rather than an entry of a registry."""
    return ":" in str(name)


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """The function that the configuration's `key` names. A file's path is relative to the working directory.

    Raises: ConfigError naming the key and the cause.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(f"{key}={spec} must be a known name or module_or_file.py:function")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [""]
        hint = " (a file's name must end in .py)" if "/" in source and not source.endswith(".py") else ""
        message = f"{key}={spec}: {source} does not import: {type(error).__name__}: {lines[0]}{hint}"
        raise ConfigError(message) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{key}={spec}: {source} has no function {name}")
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(f"{key}={spec}: {name} must be a plain function, not {type(function).__name__}")
    return function


def check_call(function: Callable[..., Any], spec: str, key: str, arguments: dict[str, Any]) -> None:
    """Raises: ConfigError where `function` does not take `arguments` by name."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{key}={spec} cannot be called with {', '.join(arguments)} by name: {error}") from error
    except ValueError:  # a builtin without a signature
        return


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.absolute()}")
    name = f"mcore_rl_user_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
