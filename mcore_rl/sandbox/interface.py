"""What is run, what comes of it, and who runs it: this machine or a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Why = Literal["exit", "timeout", "output", "memory"]
"""Why a run ended: by itself, or at its limit of time, of output, or of memory in all."""


@dataclass(frozen=True)
class Program:
    """Code with what it reads. `files` are written beside it before it starts; those named in `fetch` come back if
    they are regular files. seconds, memory_mib: less than the configuration's, None: as much."""

    code: str
    language: str = "python"
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()
    seconds: float | None = None
    compile_seconds: float | None = None
    memory_mib: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended. return_code: 128 + N after signal N. stdout and stderr are cut where `why` is "output".

    stage: "compile" where the compiler failed and nothing else ran; else `compilation` is how the compiler ended.
    """

    why: Why
    return_code: int
    stdout: str
    stderr: str
    seconds: float
    files: Mapping[str, bytes] = field(default_factory=dict)
    stage: Literal["compile", "run"] = "run"
    compilation: Outcome | None = None

    @property
    def ok(self) -> bool:
        return self.why == "exit" and self.return_code == 0


class Sandbox(Protocol):
    """Runs programs; may be called from many threads at once."""

    def run(self, program: Program) -> Outcome:
        """Raises: SandboxError if the program could not be run at all."""
        ...
