"""An interpreter or a shell that lives as long as an episode, in one sandbox: cells see what earlier ones have left."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.confinement.limits import Limits
from mcore_rl.sandbox.confinement.start import Confined, Confinement
from mcore_rl.sandbox.exchange import Budget, Exchange
from mcore_rl.sandbox.interface import Why

Ended = Why | Literal["gone"]
DRIVER = Path(__file__).with_name("driver.py").read_text()
SHELL = r"""
case $1 in 3) ;; *) eval "exec 3>&$1 $1>&-" ;; esac
echo ready >&3
while IFS= read -r -d '' sandbox_command; do
  eval "$sandbox_command" </dev/null 3>&-
  echo "$?" >&3
done
"""
"""Answers go to descriptor 3: from 10 on bash puts its own copies, of those that a command has redirected."""
START_SECONDS = 60.0
_ANSWER_BYTES = 1 << 12
_SLACK_BYTES = 1 << 12
"""Beyond the limit on output that the driver holds by itself: what goes past it counts here."""


@dataclass(frozen=True)
class CellOutcome:
    """What a cell printed, standard error included, and whether it succeeded. `why` it ended: "exit" by itself, even if
    it raised; at a limit; or "gone": its interpreter had ended before, and no state is left.

    After "timeout" and "memory" the interpreter has ended; after "output" it may have.
    """

    output: str
    ok: bool
    why: Ended


class _Session:
    """One sandbox with a process that answers requests. Cells wait for each other; close() does not wait for a cell."""

    name = "session"

    def __init__(
        self, config: SandboxConfig, confinement: Confinement, turns: threading.Semaphore, inside: list[str]
    ) -> None:
        """inside: the command, to which the descriptor of answers and the limit of output are added."""
        limits = Limits.of(config).of_session()
        self._seconds = config.seconds
        self._output_bytes = limits.output_bytes
        self._turns = turns
        self._lock = threading.Lock()
        self._gone: str | None = None
        self._reader, writer = os.pipe()
        command = [*inside, str(writer), str(limits.output_bytes)]
        try:
            self._confined = Confined(confinement, command, limits, inherited=(writer,), one_output=True)
        except BaseException:
            os.close(self._reader)
            raise
        finally:
            os.close(writer)
        self._exchange = Exchange(self._confined)
        self._budgets = Budget(limits.output_bytes + _SLACK_BYTES), Budget(_ANSWER_BYTES)
        self._await_start()

    @property
    def alive(self) -> bool:
        return self._gone is None

    def close(self) -> None:
        """Ends it with everything that it has started; a cell that is running returns. May be called again."""
        if self._gone is None:
            self._gone = f"the {self.name} was closed"
            self._confined.kill()
        with self._lock:
            self._release()

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _await_start(self) -> None:
        process = self._confined.process
        assert process.stdout is not None
        self._output = self._exchange.receive(process.stdout.fileno(), self._budgets[0])
        self._answers = self._exchange.receive(self._reader, self._budgets[1])
        self._released = False
        why = self._exchange.until(lambda: b"\n" in self._answers, START_SECONDS)
        if why != "exit" or b"\n" not in self._answers:
            words = self._output.decode("utf-8", "replace").strip()
            self._gone = "it did not start"
            self._release()
            raise SandboxError(f"the {self.name} in the sandbox did not start: {words or why}")

    def _ask(self, request: bytes, seconds: float | None) -> tuple[str, bytes | None, Ended]:
        """What was printed, the answer (None: there is none, and the session has ended), and why it came to that."""
        limit = self._seconds if seconds is None else min(seconds, self._seconds)
        with self._lock, self._turns:
            if self._gone is not None:
                return self._gone, None, "gone"
            try:
                why = self._follow(request, limit)
                if why == "exit" and b"\n" in self._answers:
                    return self._printed(), bytes(self._answers).splitlines()[0], why
            except BaseException:  # of the caller's thread: what the cell still does, nobody would read
                self._end("exit", limit)
                raise
            return self._printed(), None, self._end("memory" if self._confined.memory_exceeded() else why, limit)

    def _follow(self, request: bytes, seconds: float) -> Why:
        stdin = self._confined.process.stdin
        assert stdin is not None
        for buffer, budget in zip((self._output, self._answers), self._budgets, strict=True):
            buffer.clear()
            budget.renew()
        self._exchange.send(stdin, request, close=False)
        why = self._exchange.until(lambda: b"\n" in self._answers, seconds)
        return self._exchange.drain() if why == "exit" else why

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
        self._release()
        return why if why in reasons else "gone"

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self._exchange.close()
            os.close(self._reader)
            self._confined.end()


class Interpreter(_Session):
    """Python: cell by cell, with a namespace that stays."""

    name = "interpreter"

    def __init__(self, config: SandboxConfig, confinement: Confinement, turns: threading.Semaphore) -> None:
        super().__init__(config, confinement, turns, [os.path.abspath(config.python), "-I", "-u", "-c", DRIVER])

    def cell(self, code: str, seconds: float | None = None) -> CellOutcome:
        """Runs a cell; the value of a last expression is printed. seconds: less than sandbox.seconds."""
        output, answer, why = self._ask(json.dumps(code).encode() + b"\n", seconds)
        if answer is None:
            return CellOutcome(output, False, why)
        ok, limit = False, False
        with suppress(ValueError, TypeError, AttributeError, RecursionError):  # forged by the cell
            fields = json.loads(answer)
            ok, limit = fields.get("ok") is True, fields.get("why") == "output"
        return CellOutcome(output, ok and not limit, "output" if limit else "exit")


class Shell(_Session):
    """bash: command by command; directory, variables and functions stay."""

    name = "shell"

    def __init__(self, config: SandboxConfig, confinement: Confinement, turns: threading.Semaphore) -> None:
        super().__init__(config, confinement, turns, ["/bin/bash", "--norc", "--noprofile", "-c", SHELL, "sandbox"])

    def cell(self, code: str, seconds: float | None = None) -> CellOutcome:
        """Runs commands; ok: the last of them ended with 0. seconds: less than sandbox.seconds."""
        output, answer, why = self._ask(code.replace("\0", "").encode("utf-8", "replace") + b"\0", seconds)
        return CellOutcome(output, answer == b"0", why)
