"""Functions that users bring: what a key names as `module_or_file.py:function`.

A file's path is relative to the working directory. Each process loads what it calls, and loads a file once, whatever
names it: a function crosses processes as its name, never as a reference into a module that the other may not have.
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

__all__ = [
    "FORM",
    "absolute_spec",
    "check_call",
    "describe",
    "load_function",
    "load_module",
    "load_object",
    "names_function",
]

FORM = "module_or_file.py:function"


def names_function(spec: str) -> bool:
    """Whether `spec` has the form of a user's function: names of ours have no colon."""
    return ":" in spec


def absolute_spec(spec: str) -> str:
    """`spec` for a process with another working directory; what names no file stays as it is."""
    file, colon, function = spec.rpartition(":")
    return f"{os.path.abspath(file)}:{function}" if colon and file.endswith(".py") else spec


def load_function(key: str, spec: str, instead: str = "", *, may_be_async: bool = False) -> Callable[..., Any]:
    """The function that `key=spec` names; `instead` says what else the key could hold, for the message.

    Raises: ConfigError naming `key` and the cause.
    """
    told, name = f"{key}={spec}", spec.rpartition(":")[2]
    function = load_object(key, spec, instead)
    if not callable(function):
        raise ConfigError(f"{told}: {name} must be a plain function, not {type(function).__name__}")
    if not may_be_async and _is_async(function):
        raise ConfigError(f"{told}: {name} must be a plain function, not an async one; write def in place of async def")
    plain: Callable[..., Any] = function
    return plain


def load_object(key: str, spec: str, instead: str = "") -> Any:
    """Whatever `key=spec` names, as load_function finds it; not None.

    Raises: ConfigError naming `key` and the cause.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(f"{key}={spec} must be {instead + ' or ' if instead else ''}{FORM}")
    told = f"{key}={spec}"
    provide_user_files()
    module = load_file(told, Path(source)) if source.endswith(".py") else load_named(told, source)
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"{told}: {source} has no function {name}")
    return found


def load_module(key: str, path: str) -> ModuleType:
    """A user's file as a whole.

    Raises: ConfigError naming `key` and the cause.
    """
    provide_user_files()
    return load_file(f"{key}={path}", Path(path))


def check_call(
    told: str, function: Callable[..., Any], given: Collection[str], options: Mapping[str, Any], form: str
) -> None:
    """Whether `function` takes the keywords `given` and `options`; `told` (key=value) and `form`, how it should look,
    are for the message.

    Raises: ConfigError.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without one
        return
    try:
        signature.bind(**dict.fromkeys(given), **options)
    except TypeError as error:
        raise ConfigError(f"{told} cannot be called as {form}: {error}") from error


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
