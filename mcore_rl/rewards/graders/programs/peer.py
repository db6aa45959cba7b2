"""Calls between the tests' process and the program's process. Runs inside the sandbox, in both processes.

An object that cannot be passed by value stays in its process. The other process holds a RemoteObject that forwards
operations to it. In the tests' process, comparing a RemoteObject with a plain value is always false, and its methods
never receive expected values as operands: the program under test implements these methods and could cheat.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import os
import struct
import threading
import types
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from mcore_rl.rewards.graders.programs.wire import TYPES, Decoder, Encoder, Owner, WireError

MAX_FRAME_BYTES = 32 << 20
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor".split()
OPERAND = (*_BINARY, *(f"r{name}" for name in _BINARY), *(f"i{name}" for name in _BINARY if name != "divmod"))
"""Methods that receive the other operand."""
PLAIN = (
    "len iter next getitem setitem delitem call str repr format bool int float complex index neg pos abs invert round "
    "trunc floor ceil enter exit reversed hash length_hint fspath bytes aiter copy deepcopy"
).split()
SPECIAL = frozenset(f"__{name}__" for name in (*COMPARISONS, *OPERAND, *PLAIN, "contains"))
HIDDEN = ("_", "gi_", "cr_", "ag_", "f_", "tb_", "co_")
"""Prefixes of attributes that expose the code around an object."""
_PRINTED_CHARACTERS = 1 << 16


class RemoteObject:
    """Proxy of an object in the other process.

    trusted: the tests name the object's class, so its operators may receive operands. guarded: a method of an
    untrusted object, which must not receive arguments.
    """

    # No annotations of attributes here: a test that reads f.__annotations__ would get them in place of the program's.
    def __init__(self, peer: CallPeer, handle: int, kind: str, type_name: str, *, trusted: bool) -> None:
        # Not by assignment, which __setattr__ would forward.
        vars(self).update(
            _peer=peer, _handle=handle, _kind=kind, _type_name=type_name, _trusted=trusted, _guarded=False
        )

    def __getattr__(self, name: str) -> Any:
        value = self._peer.ask("get", self, name)
        # A method of an instance has the trust of the instance. Functions of modules and classes are the subject of the
        # tests and take any arguments.
        if isinstance(value, RemoteObject) and self._kind == "instance":
            value.__dict__.update(_trusted=self._trusted, _guarded=not self._trusted)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        self._peer.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.ask("del", self, name)

    def __eq__(self, other: object) -> Any:
        return self._compared("__eq__", other)

    def __ne__(self, other: object) -> Any:
        return self._compared("__ne__", other)

    def __hash__(self) -> int:
        return hash((id(self._peer), self._handle))

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, RemoteObject) and bool(self._peer.ask("isinstance", instance, self))

    def __subclasscheck__(self, subclass: object) -> bool:
        return isinstance(subclass, RemoteObject) and bool(self._peer.ask("issubclass", subclass, self))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"{self._type_name} object is in another process")

    def _compared(self, method: str, other: object) -> Any:
        if not (isinstance(other, RemoteObject) and other._peer is self._peer):
            return NotImplemented  # Python falls back to identity, so == is false
        # Answer here, so that the program cannot make an object unequal to itself.
        if other is self and method in ("__eq__", "__ne__"):
            return method == "__eq__"
        return self._peer.ask("special", self, method, other)

    def _made(self, value: object) -> object:
        # Results of a trusted object are trusted: s + s is a Stack if the tests name Stack.
        if self._trusted and isinstance(value, RemoteObject):
            value.__dict__["_trusted"] = True
        return value


def _forwarder(method: str) -> Callable[..., object]:
    def forward(self: RemoteObject, *arguments: object, **named: object) -> object:
        if method[2:-2] in COMPARISONS:
            return self._compared(method, *arguments)
        safe = self._trusted or all(isinstance(each, RemoteObject) for each in arguments)
        if method[2:-2] in OPERAND and not safe:
            return NotImplemented  # the program must not receive an expected value
        if method == "__call__":
            if self._guarded and (arguments or named):
                raise TypeError(f"a method of {self._type_name}, which the tests do not name, cannot take arguments")
            return self._made(self._peer.ask("call", self, list(arguments), named))
        return self._made(self._peer.ask("special", self, method, *arguments))

    def contains(self: Any, item: object) -> bool:
        if self._trusted:
            return bool(self._peer.ask("special", self, method, item))
        # Compare here, so that the program does not receive the item.
        return any(each is item or each == item for each in self)

    def leave(self: RemoteObject, kind: object, error: object, trace: object) -> bool:
        failed = isinstance(error, AssertionError)  # a program's context manager must not suppress failed assertions
        described = (None, None, None) if failed or error is None else (type(error), error, None)
        return bool(self._peer.ask("special", self, method, *described)) and not failed

    def follow(self: RemoteObject) -> object:
        return self._peer.ask("special", self, method, stop=True)  # the only call that may raise StopIteration

    named: dict[str, Callable[..., object]] = {"__contains__": contains, "__exit__": leave, "__next__": follow}
    return named.get(method, forward)


class CallPeer(Owner):
    """One end of the connection. reader, writer: descriptors of pipes."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = os.fdopen(reader, "rb"), os.fdopen(writer, "wb")
        # Exported objects stay alive until the process ends, so that the ids in _handles stay unique.
        self._exported: dict[int, object] = {}
        self._handles: dict[int, int] = {}
        self._remotes: dict[int, object] = {}
        self._classes: dict[frozenset[str], type[RemoteObject]] = {}
        self.trusts = False
        """Operators of the other side's objects may receive operands."""
        self.broken = False
        """The connection has failed. Results are then invalid."""
        # Reentrant: the answer to a callback may need another request in the same thread.
        self._lock = threading.RLock()

    def ask(self, operation: str, *parts: object, stop: bool = False) -> object:
        """Perform an operation in the other process and return its result.

        Raises: the operation's exception; WireError, EOFError, OSError if the connection fails.
        """
        with self._lock:
            try:
                value, ok = self._exchange(operation, parts)
            except (WireError, EOFError, OSError):
                self.broken = True
                raise
        if not ok:
            raise self._error(value, stop)
        return value

    def _exchange(self, operation: str, parts: tuple[object, ...]) -> tuple[object, bool]:
        encoder = Encoder(self)
        root = encoder.encode(list(parts))
        self._send({"do": operation, "root": root, "nodes": encoder.nodes})
        while "do" in (message := self._receive()):  # calls back into this process before the result
            self.answer(message)
        decoder = Decoder(self, message.get("nodes"), encoder.objects)
        # The other side may be the program: it may change containers that it received, and nothing else.
        for index, content in message.get("changed", []):
            if index not in encoder.objects or not encoder.may_change(index):
                raise WireError("change of an object that was not passed by value")
            decoder.content(content, encoder.objects[index])
        self.show_printed(str(message.get("printed", ""))[:_PRINTED_CHARACTERS])
        return decoder.value(message.get("root")), message.get("ok") is True

    def serve(self) -> None:
        """Answer requests until the other side closes the connection."""
        with contextlib.suppress(EOFError):
            while True:
                self.answer(self._receive())

    def answer(self, message: Mapping[str, object]) -> None:
        """Perform a requested operation and send its result."""
        decoder = Decoder(self, message.get("nodes"))
        parts = decoder.value(message.get("root"))
        before = {index: _snapshot(shell) for index, shell in decoder.shells.items()}
        try:
            result, ok = self.perform(str(message["do"]), *parts), True
        except WireError:
            raise
        except BaseException as error:  # an exception is the result of the operation
            result, ok = _described(error), False
        encoder = Encoder(self, decoder.shells)
        root = encoder.encode(result)
        # Mutable arguments are passed by value; send back those that the operation changed in place.
        changed = [
            [index, encoder.content(shell)]
            for index, shell in decoder.shells.items()
            if shell is not parts and not _same(before[index], _snapshot(shell))
        ]
        self._send({"ok": ok, "root": root, "nodes": encoder.nodes, "changed": changed, "printed": self.take_printed()})

    def perform(self, operation: str, target: object, *parts: object) -> object:
        """Perform an operation on an object of this process."""
        if not self.may(operation, target, *parts):
            raise AttributeError(f"{operation} is not allowed from the other process")
        return _OPERATIONS[operation](target, *parts)

    def may(self, operation: str, target: object, *parts: object) -> bool:
        """Return whether the other side may perform an operation."""
        return operation in _OPERATIONS and (operation != "special" or parts[0] in SPECIAL)

    def take_printed(self) -> str:
        """Return the text printed by this side since the last call."""
        return ""

    def show_printed(self, text: str) -> None:
        """Handle text that the other side has printed."""

    def record_class(self, name: str) -> type[object] | None:
        """Return the class of objects that are passed by value, by its name; None if there is no such class."""
        return None

    # Methods of wire.Owner

    def fields_of(self, value: object) -> tuple[str, Mapping[str, object]] | None:
        name = type(value).__name__
        is_record = self.record_class(name) is type(value) and hasattr(value, "__dict__")
        return (name, vars(value)) if is_record else None

    def new_record(self, name: str) -> object:
        kind = self.record_class(name)
        return super().new_record(name) if kind is None else kind.__new__(kind)

    def export(self, value: object) -> list[object]:
        if isinstance(value, RemoteObject):
            return ["yours", value._handle]
        if id(value) not in self._handles:
            self._handles[id(value)] = len(self._exported)
            self._exported[len(self._exported)] = value
        owner = type(value)
        special = sorted(name for name in SPECIAL if getattr(owner, name, None) is not getattr(object, name, None))
        bases: list[list[object]] = []
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [self._base(base) for base in value.__bases__ if issubclass(base, BaseException)]
        name = value.__name__ if isinstance(value, (type, types.ModuleType)) else owner.__name__
        return ["remote", self._handles[id(value)], _kind(value), str(name), special, bases]

    def _base(self, value: type) -> list[object]:
        return ["type", value.__name__] if TYPES.get(value.__name__) is value else self.export(value)

    def resolve(self, node: list[Any]) -> object:
        if node[0] == "yours":
            return self._exported[node[1]]
        if node[0] != "remote":
            return super().resolve(node)
        handle, kind, name, special, bases = node[1:]
        if handle not in self._remotes:
            if bases:  # an exception class: `except` accepts real classes only
                self._remotes[handle] = type(str(name), tuple(map(self._exception, bases)), {})
            else:
                self._remotes[handle] = self._remote(handle, str(kind), str(name), frozenset(special))
        remote = self._remotes[handle]
        # A new coroutine each time, because Python awaits a coroutine once.
        return self._awaitable(remote) if kind == "coroutine" else remote

    def _exception(self, node: list[Any]) -> type[BaseException]:
        kind = TYPES[node[1]] if node[0] == "type" else self.resolve(node)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise WireError("the base of an exception class is not an exception class")
        return kind

    async def _awaitable(self, remote: object) -> object:
        return self.ask("await", remote)

    def _remote(self, handle: int, kind: str, name: str, special: frozenset[str]) -> RemoteObject:
        # Python looks up special methods on the class: one class per set of methods.
        if special not in self._classes:
            methods = {method: _forwarder(method) for method in special & SPECIAL if method not in ("__eq__", "__ne__")}
            self._classes[special] = type("RemoteObject", (RemoteObject,), methods)
        return self._classes[special](self, handle, kind, name, trusted=self.trusts)

    def _error(self, value: Any, stop: bool) -> BaseException:
        kind, arguments, fields, text = value
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            return WireError("the class of an error is not an exception class")
        if issubclass(kind, (StopIteration, StopAsyncIteration, GeneratorExit)) and not stop:
            # StopIteration would end a loop in the tests.
            return RuntimeError(f"{kind.__name__} outside of an iterator")
        error = kind.__new__(kind)  # without __init__, whose parameters are unknown
        error.args = tuple(arguments) or ((str(text),) if text else ())
        for name, each in fields.items():
            if isinstance(name, str) and not name.startswith("_"):
                error.__dict__[name] = each
        return error

    def _send(self, message: Mapping[str, object]) -> None:
        data = json.dumps(message).encode()
        if len(data) > MAX_FRAME_BYTES:
            raise WireError(f"a message of more than {MAX_FRAME_BYTES} bytes")
        self._writer.write(struct.pack(">I", len(data)) + data)
        self._writer.flush()

    def _receive(self) -> dict[str, Any]:
        """Read one message.

        Raises: EOFError, WireError.
        """
        header = self._reader.read(4)
        if len(header) < 4:
            raise EOFError("the program's process has ended")
        (size,) = struct.unpack(">I", header)
        if size > MAX_FRAME_BYTES:
            raise WireError(f"a message of more than {MAX_FRAME_BYTES} bytes")
        try:
            message = json.loads(self._reader.read(size))
        except (ValueError, RecursionError):
            raise WireError("a message that is not JSON") from None
        if not isinstance(message, dict):
            raise WireError("a message that is not a JSON object")
        return message


def _special(target: object, method: str, *arguments: object) -> object:
    if method in _BY_FUNCTION:
        return _BY_FUNCTION[method](target)
    return getattr(type(target), method)(target, *arguments)


def _await(target: Awaitable[object]) -> object:
    async def wait() -> object:
        return await target

    return asyncio.run(wait())


_BY_FUNCTION: dict[str, Callable[..., object]] = {
    "__next__": next,
    "__copy__": copy.copy,
    "__deepcopy__": copy.deepcopy,
}
_OPERATIONS: dict[str, Callable[..., object]] = {
    "call": lambda target, arguments, named: target(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "del": delattr,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "await": _await,
    "special": _special,
}


def _kind(value: object) -> str:
    if isinstance(value, type):
        return "class"
    if isinstance(value, types.ModuleType):
        return "module"
    if inspect.iscoroutine(value):
        return "coroutine"
    functions = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    return "function" if isinstance(value, functions) else "instance"


def _described(error: BaseException) -> tuple[object, ...]:
    try:
        text = str(error)
    except Exception:  # __str__ of the program's class may raise anything
        text = ""
    return type(error), list(error.args), dict(getattr(error, "__dict__", {})), text


def _snapshot(shell: object) -> Sequence[object]:
    if isinstance(shell, bytearray):
        return bytes(shell)
    content = shell if isinstance(shell, Iterable) else vars(shell)
    return [each for pair in content.items() for each in pair] if isinstance(content, dict) else list(content)


def _same(before: Sequence[object], after: Sequence[object]) -> bool:
    if isinstance(before, bytes):
        return before == after
    return len(before) == len(after) and all(one is other for one, other in zip(before, after))  # noqa: B905 (Python 3.9)
