"""Process of the program under test. It runs inside the sandbox and receives calls, but never the tests.

Arguments of the process: file descriptors for reading requests and for writing results.
"""

from __future__ import annotations

import io
import sys
import types
from typing import Any

from mcore_rl.rewards.graders.programs.peer import CallPeer
from mcore_rl.rewards.graders.programs.prelude import NODES, SOLUTION, execute, take


class Candidate(CallPeer):
    """End of the connection in the program's process."""

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        self.trusts = True
        self._printed = sys.stdout = io.StringIO()
        self._records: list[str] = []
        self._module = types.ModuleType(SOLUTION)

    def take_printed(self) -> str:
        return take(self._printed)

    def perform(self, operation: str, target: object, *parts: Any) -> object:
        if operation != "load":
            return super().perform(operation, target, *parts)
        context, self._records = parts
        self._module = execute(str(target), SOLUTION, context=context)
        return self._module

    def record_class(self, name: str) -> type[object] | None:
        return getattr(self._module, name, NODES.get(name)) if name in self._records else None

    def resolve(self, node: list[Any]) -> object:
        if node[0] != "builtin":
            return super().resolve(node)
        module = __import__(node[1], fromlist=["*"])
        return getattr(module, node[2])


def main() -> None:
    Candidate(int(sys.argv[1]), int(sys.argv[2])).serve()
