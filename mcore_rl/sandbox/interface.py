"""Programs, their outcomes, and the protocol of a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Why = Literal["exit", "timeout", "output", "memory"]
"""Reason why a run ended: normal exit, or the limit of time, output or total memory."""


@dataclass(frozen=True)
class Program:
    """Code and its input.

    files: written to the working directory before the program starts.
    fetch: names of files to return afterwards; only regular files are returned.
    seconds: time limit, at most sandbox.seconds; None: sandbox.seconds.
    """

    code: str
    language: str = "python"
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    return_code: 128 + N after signal N.
    stdout, stderr: truncated if `why` is "output".
    stage: "compile" if the compiler failed, so that the program did not run.
    """

    why: Why
    return_code: int
    stdout: str
    stderr: str
    seconds: float
    files: Mapping[str, bytes] = field(default_factory=dict)
    stage: Literal["compile", "run"] = "run"

    @property
    def ok(self) -> bool:
        return self.why == "exit" and self.return_code == 0


class Sandbox(Protocol):
    """Runs programs. Thread-safe."""

    def run(self, program: Program) -> Outcome:
        """Run a program and wait for it. Raises: SandboxError if the program could not be started."""
        ...
