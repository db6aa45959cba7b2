"""Child processes of benchmarks. An error in a child is raised in the parent, with the child's traceback or stderr."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SECONDS_TO_END = 20.0
"""Time for a child to exit by itself; it is then killed."""


class ChildError(Exception):
    """A child process failed; the last line of the message is its own error."""


@dataclass(frozen=True)
class _ChildTraceback:
    text: str


class PipedChild:
    """Child process that runs `target(pipe, *arguments)`, with the parent's end of the pipe."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self.name = target.__name__.strip("_")
        context = multiprocessing.get_context("spawn")  # a process with a CUDA context must not fork
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(target, theirs, *arguments), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        theirs.close()  # with its only writer in the child, the pipe ends when the child ends

    def send(self, message: object) -> None:
        """Send a message. Raises: ChildError if the child has ended."""
        try:
            self._pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            # The child has ended: its traceback, if it sent one, is still in the pipe.
            self.recv(object)
            raise ChildError(f"child process {self.name} no longer reads") from None

    def recv(self, kind: type[T]) -> T:
        """Receive a message of this type. Raises: ChildError if the child has failed or ended."""
        try:
            message = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(SECONDS_TO_END)
            raise ChildError(
                f"child process {self.name} ended with exit code {self._process.exitcode} before it answered"
            ) from None
        if isinstance(message, _ChildTraceback):
            raise ChildError(f"child process {self.name} failed:\n{message.text}")
        if not isinstance(message, kind):
            raise ChildError(f"child process {self.name} sent {message!r} instead of {kind.__name__}")
        return message

    def end(self, last: object = None) -> None:
        """Send `last`, after which the child should return; kill it if it does not."""
        with contextlib.suppress(OSError):  # it may have ended
            self._pipe.send(last)
        self._process.join(SECONDS_TO_END)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(target: Callable[..., None], pipe: Connection, *arguments: object) -> None:
    try:
        target(pipe, *arguments)
    except Exception:  # process boundary: the parent raises it
        pipe.send(_ChildTraceback(traceback.format_exc().strip()))
        raise SystemExit(1) from None  # without a second traceback on stderr


def run_command(command: Sequence[str], cwd: Path, timeout: float | None = None) -> None:
    """Run a program and wait for it; its output is discarded.

    Raises: ChildError with its stderr if it fails.
    """
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout)
    if done.returncode:
        raise ChildError(f"{Path(command[0]).name} ended with code {done.returncode}:\n{done.stderr.strip()}")


class LineProgram:
    """Program that reads a line from stdin per request, and answers with a line of JSON numbers on stdout.

    Lines that are not JSON objects go to stderr. `name` is part of error messages.
    """

    def __init__(self, name: str, command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> None:
        self._name = name
        # A file, not a pipe: nobody would read the pipe, and a full one blocks the program.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with this object
        self._process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self.pid = self._process.pid

    def ask(self) -> dict[str, float]:
        """Send a request and return its answer. Raises: ChildError if the program has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` raises its error
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, float]:
        """Return the next answer. Raises: ChildError if the program has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                numbers: dict[str, float] = json.loads(line)
                return numbers
            print(line, end="", file=sys.stderr)
        code = self._process.wait()
        self._errors.seek(0)
        raise ChildError(f"{self._name} ended with code {code}:\n{self._errors.read().strip()}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
