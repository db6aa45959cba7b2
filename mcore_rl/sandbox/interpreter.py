"""Interpreter and shell of an episode: one sandbox, in which cells share their state."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.confinement.commands import SESSION_CPU_FACTOR, Confinement, RunLimits
from mcore_rl.sandbox.confinement.start import Budget, Confined
from mcore_rl.sandbox.interface import Why

Ended = Why | Literal["gone"]
PYTHON = "{python}"
DRIVER = Path(__file__).with_name("driver.py").read_text()
SHELL = r"""
case $1 in 3) ;; *) eval "exec 3>&$1 $1>&-" ;; esac
echo ready >&3
while IFS= read -r -d '' sandbox_command; do
  eval "$sandbox_command" </dev/null 3>&-
  echo "$?" >&3
done
"""
"""Writes results to descriptor 3: bash uses descriptors from 10 for its copies of redirected ones."""
START_SECONDS = 60.0
"""Time limit of the start, which sandbox.seconds does not include: a busy machine can take longer than a cell may."""
_RESULT_BYTES = 1 << 12
"""Maximum size of a result line, which contains only a status; the descriptor is also open to the program."""
_SLACK_BYTES = 1 << 12
"""Allowed excess over the output limit, which the driver enforces for Python output; other output is counted here."""


@dataclass(frozen=True)
class CellOutcome:
    """Result of a cell.

    output: stdout and stderr.
    why: "exit" after a normal end or an exception; a limit; or "gone" if the interpreter has ended and its state is
    lost. After "timeout" and "memory" the interpreter is dead; after "output" it can be.
    """

    output: str
    ok: bool
    why: Ended


class _CellRunner:
    """Sandbox with a process that runs cells one after another. close() interrupts a running cell."""

    name = "session"
    inside: tuple[str, ...]
    """Command, in which PYTHON stands for sandbox.python. The descriptor for results and the output limit in bytes
    are appended."""

    def __init__(self, config: SandboxConfig, confinement: Confinement, slots: threading.Semaphore) -> None:
        inside = [os.path.abspath(config.python) if word == PYTHON else word for word in self.inside]
        limits = RunLimits(**vars(config) | {"cpu_seconds": config.cpu_seconds * SESSION_CPU_FACTOR})
        self._seconds, self._output_bytes = config.seconds, limits.output_kib << 10
        self._slots, self._lock = slots, threading.Lock()
        self._gone: str | None = None
        # One pipe for stdout and stderr keeps their order.
        self._confined = Confined(
            confinement, lambda results: [*inside, str(results), str(self._output_bytes)], limits, one_output=True
        )
        self._budgets = Budget(self._output_bytes + _SLACK_BYTES), Budget(_RESULT_BYTES)
        self._output = self._confined.receive(self._confined.process.stdout, self._budgets[0])
        self._results = self._confined.receive(self._confined.results, self._budgets[1])
        why = self._confined.until(lambda: b"\n" in self._results, START_SECONDS)
        if why != "exit" or b"\n" not in self._results:
            message = self._output.decode("utf-8", "replace").strip()
            self._gone = "it did not start"
            self._confined.end()
            raise SandboxError(f"the {self.name} in the sandbox did not start: {message or why}")

    @property
    def alive(self) -> bool:
        return self._gone is None

    def close(self) -> None:
        """Kill the process tree; a running cell returns. Idempotent."""
        # Without the lock, which a running cell holds: the kill makes it return.
        if self._gone is None:
            self._gone = f"the {self.name} was closed"
            self._confined.kill()
        with self._lock:
            self._confined.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _request(self, request: bytes, seconds: float | None) -> tuple[str, bytes | None, Ended]:
        """Run a cell. Returns its output, its result line (None if the session has ended), and the reason."""
        limit = self._seconds if seconds is None else min(seconds, self._seconds)
        # In this order: a cell that waits for another cell of its session takes no slot.
        with self._lock, self._slots:
            if self._gone is not None:
                return self._gone, None, "gone"
            try:
                why = self._follow(request, limit)
                if why == "exit" and b"\n" in self._results:
                    return self._printed(), bytes(self._results).splitlines()[0], why
            except BaseException:  # the caller was interrupted and will not read the rest of the cell's output
                self._end("exit", limit)
                raise
            return self._printed(), None, self._end("memory" if self._confined.memory_exceeded() else why, limit)

    def _follow(self, request: bytes, seconds: float) -> Why:
        for buffer, budget in zip((self._output, self._results), self._budgets, strict=True):
            buffer.clear()
            budget.reset()
        self._confined.send(request, close=False)
        why = self._confined.until(lambda: b"\n" in self._results, seconds)
        return self._confined.drain() if why == "exit" else why

    def _printed(self) -> str:
        return bytes(self._output[: self._output_bytes]).decode("utf-8", "replace")

    def _end(self, why: Why, seconds: float) -> Ended:
        reasons = {
            "timeout": f"took longer than {seconds:g} seconds",
            "output": f"wrote more than {self._output_bytes} bytes",
            "memory": "took more memory than it may",
        }
        if self._gone is None:
            cause = f"was ended: a cell {reasons[why]}" if why in reasons else "has ended by itself"
            self._gone = f"the {self.name} {cause}; what it held is lost"
        self._confined.end()
        return why if why in reasons else "gone"


class Interpreter(_CellRunner):
    """Python interpreter whose cells share a namespace."""

    name, inside = "interpreter", (PYTHON, "-I", "-u", "-c", DRIVER)

    def cell(self, code: str, seconds: float | None = None) -> CellOutcome:
        """Run a cell and print the value of a final expression. seconds: limit, at most sandbox.seconds."""
        output, result, why = self._request(json.dumps(code).encode() + b"\n", seconds)
        if result is None:
            return CellOutcome(output, False, why)
        ok, limit = False, False
        with suppress(ValueError, TypeError, AttributeError, RecursionError):  # the cell forged its result
            fields = json.loads(result)
            ok, limit = fields.get("ok") is True, fields.get("why") == "output"
        return CellOutcome(output, ok and not limit, "output" if limit else "exit")


class Shell(_CellRunner):
    """bash session that keeps its directory, variables and functions."""

    name, inside = "shell", ("/bin/bash", "--norc", "--noprofile", "-c", SHELL, "sandbox")

    def cell(self, code: str, seconds: float | None = None) -> CellOutcome:
        """Run commands. ok: the last one exited with 0. seconds: limit, at most sandbox.seconds."""
        # A zero byte ends the request, so the code must not contain one.
        output, result, why = self._request(code.replace("\0", "").encode("utf-8", "replace") + b"\0", seconds)
        return CellOutcome(output, result == b"0", why)
