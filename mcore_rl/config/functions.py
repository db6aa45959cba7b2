"""User functions, named as `module_or_file.py:function` in the configuration, and loading of users' files as modules.

A file's path is relative to the working directory. Each process loads the functions that it calls, and each file once;
spawned child processes can import the files of their parent. Functions are sent between processes by name, never
pickled, since the receiver may not have loaded the module.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import sys
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_rl.config.stand_ins import MissingVerlName, check_verl_names, parsed, provide_verl_names
from mcore_rl.errors import ConfigError

FORM = "module_or_file.py:function"
FILES_VARIABLE = "MCORE_RL_USER_FILES"
"""Environment variable with the loaded files by module name (JSON), inherited by spawned processes."""
_PREFIX = "mcore_rl_user_"


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
    # A caller without an event loop would take the coroutine for the result.
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
    # The finders are registered by now, since the file may import verl or files of a parent process.
    module = _load_file(origin, Path(source)) if source.endswith(".py") else _load_named(origin, source)
    found: object = getattr(module, name, None)
    # None cannot be told apart from a missing name, and no caller can use it.
    if found is None:
        raise ConfigError(f"{origin}: {source} has no function {name}")
    return found


def load_module(key: str, path: str) -> ModuleType:
    """Load a user's file as a module.

    Raises: ConfigError naming `key` and the cause.
    """
    provide_user_files()
    return _load_file(f"{key}={path}", Path(path))


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
        # Only names are checked: the values exist when the function is called.
        signature.bind(**dict.fromkeys(given), **options)
    except TypeError as error:
        raise ConfigError(f"{origin} cannot be called as {form}: {error}") from error


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class _UserFiles(MetaPathFinder):
    """Finder for modules that a parent process loaded from files."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = _known_files().get(fullname) if fullname.startswith(_PREFIX) else None
        return None if file is None else importlib.util.spec_from_file_location(fullname, file)


_FINDER = _UserFiles()


def provide_user_files() -> None:
    """Make the files of the parent process importable: unpickling functions and classes imports their module."""
    provide_verl_names()
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    for file in _known_files().values():
        _add_folder(Path(file).parent)


def _load_file(origin: str, path: Path) -> ModuleType:
    """Load a file as a module. Its folder is appended to the import path, for modules in the same folder.

    Raises: ConfigError that begins with `origin`.
    """
    path = Path(os.path.abspath(path))
    if not path.is_file():
        raise ConfigError(f"{origin}: there is no file {path}")
    check_verl_names(origin, path)
    before = set(sys.modules)
    # A file with relative imports only works as a module of its package; any other file is loaded on its own.
    if any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in ast.walk(parsed(path))):
        module = _load_in_package(origin, path)
    else:
        _add_folder(path.parent)
        module = _load_alone(origin, path)
    for name in sorted(set(sys.modules) - before):
        file = getattr(sys.modules.get(name), "__file__", None)
        # A virtual environment may be inside the folder; its packages are not the user's.
        if file and file.endswith(".py") and Path(file).is_relative_to(path.parent) and "site-packages" not in file:
            check_verl_names(origin, Path(file))
    return module


def _load_named(origin: str, name: str) -> ModuleType:
    """Import a module by name.

    Raises: ConfigError that begins with `origin`.
    """
    module = _import(origin, name, name, "" if "/" not in name else " (a file's name must end in .py)")
    file = getattr(module, "__file__", None)  # built-in C modules have no file
    # The project's own modules need no check.
    if file is not None and file.endswith(".py") and not name.startswith("mcore_rl."):
        check_verl_names(origin, Path(file))
    return module


def _import(origin: str, name: str, shown: object, hint: str = "") -> ModuleType:
    try:
        return importlib.import_module(name)
    except ConfigError as error:  # a module of the project whose optional package is missing
        raise ConfigError(f"{origin}: {error}") from error
    # SystemExit: a script that calls sys.exit() when it is imported.
    except (Exception, SystemExit, MissingVerlName) as error:
        raise ConfigError(f"{origin}: {shown} does not import: {describe(error)}{hint}") from error


def describe(error: BaseException) -> str:
    """Format an exception on one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _load_alone(origin: str, path: Path) -> ModuleType:
    # The module name is the same in every process, so that objects of the file, such as exceptions, can be pickled.
    # Dots would separate packages.
    name = f"{_PREFIX}{path.stem.replace('.', '_')}_{zlib.crc32(os.fsencode(path)):08x}"
    # Spawned processes inherit the variable, and _UserFiles finds the file under the same name.
    os.environ[FILES_VARIABLE] = json.dumps({**_known_files(), name: str(path)})
    return _import(origin, name, path)


def _load_in_package(origin: str, path: Path) -> ModuleType:
    # The package is the folder, with its parents as long as they contain __init__.py.
    folder, names = path.parent, [path.parent.name, path.stem]
    while (folder / "__init__.py").is_file() and (folder.parent / "__init__.py").is_file():
        folder = folder.parent
        names.insert(0, folder.name)
    _add_folder(folder.parent)
    name = ".".join(names)
    module = _import(origin, name, path)
    # Another package of this name may come first on the import path.
    if module.__file__ is None or not path.samefile(module.__file__):
        raise ConfigError(
            f"{origin}: {path} has relative imports and would be the module {name}, but that name belongs to "
            f"{module.__file__}; rename the folder {path.parent.name}"
        )
    return module


def _known_files() -> dict[str, str]:
    files: dict[str, str] = json.loads(os.environ.get(FILES_VARIABLE, "{}"))
    return files


def _add_folder(folder: Path) -> None:
    """Append a folder to the import path; at the end, it hides no installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
