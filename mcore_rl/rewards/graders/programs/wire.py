"""Encoding of Python values as JSON for two processes that do not trust each other. Runs inside the sandbox.

A message is a flat table of nodes that refer to each other by index, so shared objects, cycles, and deep nesting need
no recursion. A reference is a JSON scalar, or [index of a node]; negative indices refer to objects of the message that
this one answers. The receiver builds standard-library data types only: no code, no pickle, no classes of the sender. An
object of any other type stays with its owner and is represented by a handle.
"""

from __future__ import annotations

import array
import builtins
import collections
import datetime
import decimal
import fractions
import pathlib
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_LIBRARY_TYPES = (
    *(collections.deque, collections.defaultdict, collections.OrderedDict, collections.Counter),
    *(decimal.Decimal, fractions.Fraction, datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
)
TYPES = {value.__name__: value for value in (*vars(builtins).values(), *_LIBRARY_TYPES) if isinstance(value, type)}
"""Classes that are sent by name."""
# Type, encoder, and decoder of each tag. An instance of a subclass is sent as its base, without its methods.
_LEAVES: dict[str, tuple[type, Callable[[Any], object], Callable[[Any], object]]] = {
    "int": (int, lambda value: hex(int(value)), lambda text: int(text, 16)),
    "float": (float, float.hex, float.fromhex),
    "str": (str, str.__str__, str),
    "complex": (complex, complex.__repr__, complex),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
    "Fraction": (fractions.Fraction, str, fractions.Fraction),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "UUID": (uuid.UUID, str, uuid.UUID),
    "path": (pathlib.PurePath, str, pathlib.PurePosixPath),
    "ellipsis": (type(...), repr, lambda text: ...),
    "notimplemented": (type(NotImplemented), repr, lambda text: NotImplemented),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
}
_MAPPINGS = {"OrderedDict": collections.OrderedDict, "Counter": collections.Counter, "dict": dict}
_SEQUENCES = {"deque": collections.deque, "list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_NEW: dict[str, Callable[[], object]] = {
    **{tag: kind for tag, kind in (*_MAPPINGS.items(), *_SEQUENCES.items()) if tag not in ("tuple", "frozenset")},
    "defaultdict": collections.defaultdict,
}
_FROZEN = ("tuple", "frozenset", "namedtuple", "slice")
_CONTAINERS = (*_NEW, "record")
_SHELLS = (*_CONTAINERS, "bytearray")
"""Tags of mutable objects that are passed by value: the other process may change their content."""
# Larger integers are sent in hexadecimal, which parses in linear time and without a digit limit.
_MAX_INTEGER = 1 << 62


class WireError(Exception):
    """A malformed message."""


class Owner:
    """Hooks for objects that are not plain data. This base class rejects them; CallPeer keeps them behind handles."""

    def fields_of(self, value: object) -> tuple[str, Mapping[str, object]] | None:
        """Return class name and attributes of an object that is passed by value, else None."""
        return None

    def new_record(self, name: str) -> object:
        """Create an empty object of a class that both sides define. Raises: WireError."""
        raise WireError(f"unknown class {name}")

    def export(self, value: object) -> list[object]:
        """Return a node with a handle of the object. Raises: WireError."""
        raise WireError(f"a value of type {type(value).__name__} is not plain data")

    def resolve(self, node: list[Any]) -> object:
        """Return the object behind a node with a handle. Raises: WireError."""
        raise WireError(f"unknown node {node[0]!r}")


class Encoder:
    """Builder of a message's node table. `objects` maps node indices to objects.

    known: objects of the message that this one answers; they are sent as references.
    """

    def __init__(self, owner: Owner, known: Mapping[int, object] | None = None) -> None:
        self._owner = owner
        self.nodes: list[list[object]] = []
        self.objects: dict[int, object] = {}
        # negative indices refer to the known message
        self._references: dict[int, list[int]] = {id(value): [-1 - index] for index, value in (known or {}).items()}
        self._pending: list[int] = []

    def encode(self, value: object) -> object:
        """Return the reference of a value after adding all of its nodes to `nodes`."""
        reference = self._reference(value)
        self._finish()
        return reference

    def content(self, value: object) -> int:
        """Add a node with the new content of a container that the receiver already has; return its index."""
        index = self._append(value)
        self._finish()
        return index

    def may_change(self, index: int) -> bool:
        """Return whether a node's object is a mutable container that was passed by value."""
        return self.nodes[index][0] in _SHELLS

    def _reference(self, value: object) -> object:
        if value is None or type(value) in (bool, str, float):
            return value
        if type(value) is int and -_MAX_INTEGER < value < _MAX_INTEGER:
            return value
        if id(value) not in self._references:
            self._references[id(value)] = [self._append(value)]
        return self._references[id(value)]

    def _append(self, value: object) -> int:
        index = len(self.nodes)
        self.nodes.append([])
        self.objects[index] = value  # also keeps temporaries alive, so that their ids stay unique
        self._pending.append(index)
        return index

    def _finish(self) -> None:
        while self._pending:
            index = self._pending.pop()
            self.nodes[index] = self._node(self.objects[index])

    def _node(self, value: object) -> list[object]:
        if isinstance(value, type):
            name = value.__name__
            return ["type", name] if TYPES.get(name) is value else self._owner.export(value)
        for tag, (kind, text, _) in _LEAVES.items():
            if isinstance(value, kind):
                return [tag, text(value)]
        # Records before containers: a record may be a subclass of one.
        record = self._owner.fields_of(value)
        if record is not None:
            return ["record", record[0], *self._pairs(record[1].items())]
        return self._container(value) or self._owner.export(value)

    def _container(self, value: object) -> list[object] | None:
        if isinstance(value, collections.defaultdict):
            factory = value.default_factory if isinstance(value.default_factory, type) else None
            return ["defaultdict", self._reference(factory), *self._pairs(dict.items(value))]
        # Subclasses come first. The base's methods are called, because a subclass of the program could hide content.
        for tag, mapping in _MAPPINGS.items():
            if isinstance(value, mapping):
                return [tag, *self._pairs(mapping.items(value))]
        if isinstance(value, tuple) and (fields := getattr(type(value), "_fields", None)) is not None:
            return ["namedtuple", [type(value).__name__, *fields], *map(self._reference, tuple(value))]
        for tag, sequence in _SEQUENCES.items():
            if isinstance(value, sequence):
                return [tag, *map(self._reference, sequence.__iter__(value))]
        if isinstance(value, slice):
            return ["slice", *map(self._reference, (value.start, value.stop, value.step))]
        if isinstance(value, datetime.timedelta):
            return ["timedelta", value.days, value.seconds, value.microseconds]
        if isinstance(value, array.array):
            return ["list", *map(self._reference, value)]
        return _numpy_node(value)

    def _pairs(self, items: Iterable[tuple[object, object]]) -> list[object]:
        return [self._reference(each) for pair in items for each in pair]


class Decoder:
    """Builder of a message's objects. `shells` maps node indices to mutable containers.

    known: objects of the message that this one answers.
    """

    def __init__(self, owner: Owner, nodes: Any, known: Mapping[int, object] | None = None) -> None:
        self._owner, self._nodes, self._known = owner, nodes, known or {}
        self.shells: dict[int, object] = {}
        self._built: dict[int, object] = {}
        try:
            self._build()
        except WireError:
            raise
        except Exception as error:  # the sender may have written anything
            raise WireError(f"damaged message: {type(error).__name__}") from None

    def value(self, reference: Any) -> Any:
        """Return the value of a reference.

        Raises: WireError for a reference to a missing object.
        """
        if not isinstance(reference, list):
            return reference
        try:
            index = reference[0]
            return self._built[index] if index >= 0 else self._known[-1 - index]
        except (LookupError, TypeError):
            raise WireError("reference to a missing object") from None

    def _build(self) -> None:
        # Leaves and empty mutable objects first, so that references may be cyclic; then immutable containers, children
        # first; the contents of mutable objects last.
        frozen = {index: node for index, node in enumerate(self._nodes) if node[0] in _FROZEN}
        for index, node in enumerate(self._nodes):
            if index not in frozen:
                self._built[index] = self._shell(node)
        waiting, opened = list(frozen), set()
        while waiting:
            index = waiting.pop()
            if index in self._built:
                continue
            children = [ref[0] for ref in frozen[index][1:] if self._is_missing(ref)]
            if children and index in opened:
                raise WireError("cycle of immutable values")
            if children:
                opened.add(index)
                waiting += [index, *children]
            else:
                self._built[index] = self._frozen(frozen[index])
        containers = [(index, node) for index, node in enumerate(self._nodes) if node[0] in _CONTAINERS]
        # Records first: hashing a key may need the attributes of a record.
        for index, node in sorted(containers, key=lambda pair: pair[1][0] != "record"):
            self.fill(self._built[index], node)
        self.shells = {index: self._built[index] for index, node in enumerate(self._nodes) if node[0] in _SHELLS}

    def _shell(self, node: list[Any]) -> object:
        tag = node[0]
        if tag in _LEAVES:
            return _LEAVES[tag][2](node[1])
        if tag in _NEW:
            return _NEW[tag]()
        if tag in _FROM_NODE:
            return _FROM_NODE[tag](node)
        return self._owner.new_record(node[1]) if tag == "record" else self._owner.resolve(node)

    def _is_missing(self, reference: object) -> bool:
        index = reference[0] if isinstance(reference, list) and len(reference) == 1 else None
        return isinstance(index, int) and index >= 0 and index not in self._built

    def _frozen(self, node: list[Any]) -> object:
        if node[0] == "namedtuple":
            name, *fields = node[1]
            return collections.namedtuple(name, fields)(*map(self.value, node[2:]))  # type: ignore[misc]
        values = [self.value(reference) for reference in node[1:]]
        return slice(*values) if node[0] == "slice" else _SEQUENCES[node[0]](values)

    def fill(self, shell: Any, node: list[Any]) -> None:
        """Replace the content of a container by the content of a node."""
        tag, references = node[0], node[1:]
        if tag == "bytearray":
            shell[:] = bytes.fromhex(references[0])
            return
        head = references.pop(0) if tag in ("record", "defaultdict") else None
        values = [self.value(each) for each in references]
        if tag == "defaultdict":
            shell.default_factory = self.value(head)
        content = vars(shell) if tag == "record" else shell
        content.clear()
        if tag in ("record", "defaultdict", *_MAPPINGS):  # the node's tag, so that another type of content is an error
            base: Any = _MAPPINGS.get(tag, dict)  # dict.update breaks an OrderedDict
            base.update(content, _paired(values))
        else:
            getattr(content, "update" if tag == "set" else "extend")(values)

    def content(self, index: int, shell: object) -> None:
        """Replace the content of a local object by the content of node `index` of this message.

        Raises: WireError.
        """
        try:
            self.fill(shell, list(self._nodes[index]))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise WireError(f"damaged content: {type(error).__name__}") from None


def _paired(values: list[object]) -> dict[object, object]:
    return {values[index]: values[index + 1] for index in range(0, len(values), 2)}


def _numpy_node(value: Any) -> list[object] | None:
    if type(value).__module__ != "numpy" or not hasattr(value, "dtype") or value.dtype.hasobject:
        return None
    return ["numpy", value.dtype.str, list(value.shape), value.tobytes().hex(), hasattr(value, "__setitem__")]


def _numpy_value(node: list[Any]) -> object:
    import numpy

    values = numpy.frombuffer(bytes.fromhex(node[3]), node[1]).reshape(node[2])
    return values.copy() if node[4] else values[()]  # an array, which frombuffer makes read-only, or a scalar


_FROM_NODE: dict[str, Callable[[list[Any]], object]] = {
    "type": lambda node: TYPES[node[1]],
    "timedelta": lambda node: datetime.timedelta(*node[1:]),
    "numpy": _numpy_value,
}
