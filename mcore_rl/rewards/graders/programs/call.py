"""One call of a program's function with the arguments of one test. Runs inside the sandbox.

The expected value stays in the grading process, which compares it with the result on the last printed line.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mcore_rl.rewards.graders.programs.prelude import NODES, SOLUTION, TreeNode, execute
from mcore_rl.rewards.graders.programs.wire import Decoder, Owner


def main(program: str, name: str) -> None:
    """Read the arguments from standard input and print the result as JSON on the last line."""
    message = json.loads(sys.stdin.buffer.read())
    arguments = Decoder(Owner(), message["nodes"]).value(message["root"])
    # The program may redirect standard output, and finds standard input empty.
    results = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    module = execute(program, SOLUTION)
    result = _called(_function(module.__dict__, name), arguments, {**NODES, **vars(module)})
    printed = f"\n{json.dumps(result, default=_plain)}\n".encode()
    sys.stdout.flush()  # the result must be the last line
    while printed:
        printed = printed[os.write(results, printed) :]
    os._exit(0)  # skips exit handlers and does not wait for threads of the program


def _function(names: Mapping[str, Callable[..., object]], name: str) -> Callable[..., object]:
    solution = names.get("Solution", object)
    return getattr(solution(), name) if hasattr(solution, name) else names[name]


def _called(
    function: Callable[..., object], arguments: list[object], names: Mapping[str, Callable[..., object]]
) -> object:
    """Call the function; a single mapping with exactly its parameter names is passed as keyword arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function(*arguments)
    named = arguments[0] if len(arguments) == 1 else None
    if isinstance(named, dict) and set(named) == set(signature.parameters):
        return function(**{key: _node(value, signature.parameters[key], names) for key, value in named.items()})
    parameters = [*signature.parameters.values()]
    nodes = [_node(value, each, names) for value, each in zip(arguments, parameters)]  # noqa: B905 (Python 3.9)
    return function(*nodes, *arguments[len(nodes) :])


def _node(value: object, parameter: inspect.Parameter, names: Mapping[str, Callable[..., object]]) -> object:
    """Convert a list to LeetCode's nodes if the parameter is annotated as a ListNode or TreeNode."""
    annotation = str(parameter.annotation)
    if not isinstance(value, list) or "List[" in annotation:
        return value
    if "ListNode" in annotation:
        first = None
        for each in reversed(value):
            first = names["ListNode"](each, first)
        return first
    return _tree(value, names["TreeNode"]) if "TreeNode" in annotation else value


def _tree(values: list[object], kind: Callable[..., object]) -> object:
    """Build a tree from its values in level order, with None for a missing child."""
    if not values:
        return None
    root = kind(values[0])
    parents, rest = [root], iter(values[1:])
    for parent in parents:
        for side in ("left", "right"):
            value = next(rest, None)
            if value is not None:
                setattr(parent, side, kind(value))
                parents.append(getattr(parent, side))
    return root


def _plain(value: Any) -> object:
    """Convert a value that JSON cannot represent: arrays, nodes, sets, other iterables, and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "val") and hasattr(value, "next"):
        listed: list[object] = []
        while value is not None and len(listed) < 1 << 20:
            listed.append(value.val)
            value = value.next
        return listed
    if hasattr(value, "val") and hasattr(value, "left"):
        return _levels(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return list(value) if isinstance(value, Iterable) else float(value)


def _levels(root: TreeNode) -> list[object]:
    """Return the values in level order, with None for a missing child; the reverse of _tree."""
    values: list[object] = []
    level: list[TreeNode | None] = [root]
    for node in level:
        values.append(None if node is None else node.val)
        level += [] if node is None else [node.left, node.right]
    while values and values[-1] is None:
        values.pop()
    return values
