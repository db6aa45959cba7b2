"""User functions, named as `module_or_file.py:function` in the configuration.

A file's path is relative to the working directory. Each process loads the functions that it calls, and each file once.
Functions are sent between processes by name, never pickled, since the receiver may not have loaded the module.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_rl.config.user_files import describe, load_file, load_named, provide_user_files
from mcore_rl.errors import ConfigError

__all__ = ["FORM", "absolute_spec", "check_call", "describe", "load_function", "load_module", "load_object"]
__all__ += ["names_function"]

FORM = "module_or_file.py:function"


def names_function(spec: str) -> bool:
    """Return True if `spec` has the form of a user function; built-in names have no colon."""
    return ":" in spec


def absolute_spec(spec: str) -> str:
    """Make the path of a file in `spec` absolute, for processes in another working directory."""
    file, colon, function = spec.rpartition(":")
    return f"{os.path.abspath(file)}:{function}" if colon and file.endswith(".py") else spec


def load_function(key: str, spec: str, instead: str = "", *, may_be_async: bool = False) -> Callable[..., Any]:
    """Load the function that `key=spec` names. `instead` describes other allowed values, for the error message.

    Raises: ConfigError naming `key` and the cause.
    """
    origin, name = f"{key}={spec}", spec.rpartition(":")[2]
    function = load_object(key, spec, instead)
    if not callable(function):
        raise ConfigError(f"{origin}: {name} must be a plain function, not {type(function).__name__}")
    if not may_be_async and _is_async(function):
        raise ConfigError(
            f"{origin}: {name} must be a plain function, not an async one; write def in place of async def"
        )
    return function


def load_object(key: str, spec: str, instead: str = "") -> object:
    """Load the object that `key=spec` names; it is never None.

    Raises: ConfigError naming `key` and the cause.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(f"{key}={spec} must be {instead + ' or ' if instead else ''}{FORM}")
    origin = f"{key}={spec}"
    provide_user_files()
    module = load_file(origin, Path(source)) if source.endswith(".py") else load_named(origin, source)
    found: object = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"{origin}: {source} has no function {name}")
    return found


def load_module(key: str, path: str) -> ModuleType:
    """Load a user's file as a module.

    Raises: ConfigError naming `key` and the cause.
    """
    provide_user_files()
    return load_file(f"{key}={path}", Path(path))


def check_call(
    origin: str, function: Callable[..., object], given: Collection[str], options: Mapping[str, object], form: str
) -> None:
    """Check that `function` accepts the keywords `given` and `options`. `origin` (key=value) and `form` (the expected
    signature) are used in the message.

    Raises: ConfigError.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind(**dict.fromkeys(given), **options)
    except TypeError as error:
        raise ConfigError(f"{origin} cannot be called as {form}: {error}") from error


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
