"""Child processes of benchmarks. An error in a child is raised in the parent, with the child's traceback."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SECONDS_TO_END = 20.0
"""Time for a child to exit by itself; it is then killed."""


class ChildError(Exception):
    """A child process failed; the last line of the message is its own error."""


@dataclass(frozen=True)
class _Failure:
    text: str


class Child:
    """Child process that runs `target(pipe, *arguments)`, with the parent's end of the pipe."""

    def __init__(self, context: Any, target: Callable[..., None], *arguments: Any) -> None:
        """Start the child. `context`: of multiprocessing or torch.multiprocessing."""
        self.name = target.__name__.strip("_")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(target, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()  # with its only writer in the child, the pipe ends when the child ends

    def send(self, message: Any) -> None:
        """Send a message. Raises: ChildError if the child has ended."""
        try:
            self._pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            self.recv()
            raise ChildError(f"child process {self.name} no longer reads") from None

    def recv(self) -> Any:
        """Receive a message. Raises: ChildError if the child has failed or ended."""
        try:
            message = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(SECONDS_TO_END)
            raise ChildError(
                f"child process {self.name} ended with exit code {self._process.exitcode} before it answered"
            ) from None
        if isinstance(message, _Failure):
            raise ChildError(f"child process {self.name} failed:\n{message.text}")
        return message

    def end(self, last: Any = None) -> None:
        """Send `last`, after which the child should return; kill it if it does not."""
        with contextlib.suppress(OSError):
            self._pipe.send(last)
        self._process.join(SECONDS_TO_END)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(target: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    try:
        target(pipe, *arguments)
    except Exception:  # process boundary: the parent raises it
        pipe.send(_Failure(traceback.format_exc().strip()))
        raise SystemExit(1) from None


def run_command(command: Sequence[str], cwd: Path, timeout: float | None = None) -> None:
    """Run a program and wait for it; its output is discarded.

    Raises: ChildError with its stderr if it fails.
    """
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout)
    if done.returncode:
        raise ChildError(f"{Path(command[0]).name} ended with code {done.returncode}:\n{done.stderr.strip()}")


class ErrorFile:
    """Temporary file for the stderr of a program that runs at the same time."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with this object

    def ended(self, what: str, process: subprocess.Popen[str]) -> ChildError:
        """Return the error of a program that has ended too early."""
        code = process.wait()
        self.file.seek(0)
        return ChildError(f"{what} ended with code {code}:\n{self.file.read().strip()}")
