"""The process of the program under test. Runs inside the sandbox and receives calls, never tests.

Arguments of the process: file descriptors for reading requests and for writing results.
"""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Mapping
from typing import Any

from mcore_rl.rewards.graders.programs.peer import Peer
from mcore_rl.rewards.graders.programs.prelude import NODES, SOLUTION, execute


class Candidate(Peer):
    """The program's side of the connection."""

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        self.trusts = True
        self._records: list[str] = []
        self._module = types.ModuleType(SOLUTION)

    def perform(self, operation: str, target: Any, *parts: Any) -> Any:
        if operation != "load":
            return super().perform(operation, target, *parts)
        program, context, self._records = target, *parts
        self._module = execute(program, SOLUTION, context=context)
        return self._module

    def fields_of(self, value: Any) -> tuple[str, Mapping[str, Any]] | None:
        name = type(value).__name__
        is_record = name in self._records and self._record(name) is type(value) and hasattr(value, "__dict__")
        return (name, vars(value)) if is_record else None

    def new_record(self, name: str) -> Any:
        kind = self._record(name)
        if name not in self._records or kind is None:
            return super().new_record(name)
        return kind.__new__(kind)

    def resolve(self, node: list[Any]) -> Any:
        if node[0] != "builtin":
            return super().resolve(node)
        module = __import__(node[1], fromlist=["*"])
        return getattr(module, node[2])

    def _record(self, name: str) -> Any:
        return getattr(self._module, name, NODES.get(name))


def main() -> None:
    reader, writer = int(sys.argv[1]), int(sys.argv[2])
    peer = Candidate(reader, writer)
    printed = io.StringIO()

    def take() -> str:
        text = printed.getvalue()
        printed.seek(0)
        printed.truncate()
        return text

    sys.stdout, peer.take_printed = printed, take
    peer.serve()
