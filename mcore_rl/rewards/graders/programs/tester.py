"""The process that runs a data set's tests against a program in another process. Runs inside the sandbox.

It reads its request, which contains a secret, before it starts the program's process. It makes its memory and
descriptors unreadable for processes of the same user, and prints the secret only after all tests have passed.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import site
import subprocess
import sys
import types
from collections.abc import Mapping

from mcore_rl.rewards.graders.programs import prelude
from mcore_rl.rewards.graders.programs.names import NameOwners
from mcore_rl.rewards.graders.programs.peer import HIDDEN, CallPeer, RemoteObject
from mcore_rl.rewards.graders.programs.suite import UnknownFixture, run_suite

PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4
UNPROTECTED, NO_FIXTURE, LACKS = "unprotected", "fixture", "lacks"
"""Reports that no verdict is possible: the process cannot hide its memory; the tests need an unsupported pytest
fixture; the tests import modules that are not installed. Names and the secret follow."""


class Tester(CallPeer):
    """The tests' side of the connection."""

    def __init__(self, reader: int, writer: int, records: Mapping[str, type[object]]) -> None:
        super().__init__(reader, writer)
        self._records = records

    def show_printed(self, text: str) -> None:
        if text:
            sys.stdout.write(text)

    def may(self, operation: str, target: object, *parts: object) -> bool:
        """Allow calls, iteration, and public attributes of objects that a test passes to the program."""
        if operation in ("get", "set", "del"):
            plain = isinstance(target, (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type))
            return not plain and not str(parts[0]).startswith(HIDDEN)
        return super().may(operation, target, *parts)

    def export(self, value: object) -> list[object]:
        if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType):
            return ["builtin", value.__self__.__name__, value.__name__]
        if isinstance(value, (types.ModuleType, types.FrameType, types.CodeType)):
            raise TypeError(f"a {type(value).__name__} cannot be passed to the program")
        return super().export(value)

    def record_class(self, name: str) -> type[object] | None:
        return self._records.get(name)


def main() -> None:
    hidden = _hide()  # before the secret is in memory
    request = json.loads(sys.stdin.buffer.read())
    secret: str = request.pop("secret")
    if not hidden:
        print(f"\n{UNPROTECTED} {secret}")
        return
    # Only the verdict goes to the original standard output.
    verdict = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    sys.stdout = io.StringIO()  # keeps the tests' output apart from the verdict
    _trust_no_directory_of_the_program()
    sys.setrecursionlimit(prelude.RECURSION_LIMIT)
    names = NameOwners(request)
    if names.missing_modules:
        os.write(verdict, f"\n{LACKS} {', '.join(names.missing_modules)} {secret}\n".encode())
        return
    reader, writer = _start(request["candidate"])  # after the request was read: the program never sees standard input
    space = types.ModuleType("tests")
    space.__dict__.update(prelude.module_names())
    sys.modules["tests"] = space
    exec(compile(names.context, "prompt.py", "exec"), space.__dict__)
    records = {**prelude.NODES, **{name: getattr(space, name) for name in names.records}}
    peer = Tester(reader, writer, records)
    module = peer.ask("load", request["program"], request["prompt"], sorted(records))
    _bind(names, module, space)
    try:
        run_suite(request, space)
    except UnknownFixture as error:
        os.write(verdict, f"\n{NO_FIXTURE} {error} {secret}\n".encode())
        os._exit(0)  # without exit handlers, which tests may have registered
    if not peer.broken:
        os.write(verdict, f"\n{secret}\n".encode())
    os._exit(int(peer.broken))  # without exit handlers, and without waiting for threads of the tests


def _hide() -> bool:
    """Hide this process's memory, descriptors, and environment from the same user's processes; return success."""
    try:
        import ctypes

        library = ctypes.CDLL(None, use_errno=True)
        return bool(library.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0 == library.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0))
    except (ImportError, OSError, AttributeError):
        return False


def _trust_no_directory_of_the_program() -> None:
    """Remove directories that the program can write to from the module search path."""
    removed = {"", os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0])), site.getusersitepackages()}
    sys.path = [entry for entry in sys.path if entry not in removed]
    sys.path_importer_cache.clear()


def _start(source: str) -> tuple[int, int]:
    """Start the program's process; return descriptors for reading from it and writing to it."""
    reader, results = os.pipe()
    requests, writer = os.pipe()
    command = [sys.executable, "-I", "-c", source, str(requests), str(results)]
    null = subprocess.DEVNULL
    subprocess.Popen(command, pass_fds=(requests, results), stdin=null, stdout=null, stderr=null)
    os.close(requests)
    os.close(results)
    return reader, writer


def _bind(names: NameOwners, module: object, space: types.ModuleType) -> None:
    """Add the program's names that the tests may use to their module, and make the program importable."""
    comparing = prelude.starred_names(prelude.COMPARING)
    of_program = names.of_program(space.__dict__, comparing, prelude.starred_names())
    space.__dict__.update({name: comparing[name] for name in names.of_tests(space.__dict__, comparing)})
    for name in of_program:
        try:
            value = getattr(module, name)
        except AttributeError:
            continue  # a test that uses the name raises NameError
        if isinstance(value, RemoteObject) and value._kind == "module":
            if value._type_name not in getattr(sys, "stdlib_module_names", ()):
                raise ImportError(f"{value._type_name} is not a module of the standard library")
            value = importlib.import_module(value._type_name)  # the tests' own module of the same name
        if isinstance(value, RemoteObject) and value._kind == "class" and names.is_trusted(name):
            value.__dict__["_trusted"] = True
        setattr(space, name, value)
    proxy = types.ModuleType(prelude.SOLUTION)
    proxy.__getattr__ = lambda name: getattr(space, name) if name in vars(space) else getattr(module, name)  # type: ignore[method-assign]
    for name in names.modules:
        sys.modules[name] = proxy
