"""Run of a command in a sandbox: its start, its pipes, its limits of time, output and memory, and its termination."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from typing import IO

from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.confinement.commands import MIB, Confinement, RunLimits
from mcore_rl.sandbox.confinement.memory import limit_memory
from mcore_rl.sandbox.interface import Why

KILLED = 128 + signal.SIGKILL
"""Return code of a run that exceeded a limit."""
_END_SECONDS = 10.0
"""Time limit until a killed sandbox has ended."""
_CHUNK_BYTES = 1 << 16
_MEMORY_CHECK_SECONDS = 0.05
"""Interval of checks of the total memory."""


class Budget:
    """Byte limit shared by several streams; `full` is set once they exceed it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.reset()

    def reset(self) -> None:
        self._left = self._limit_bytes
        self.full = False

    def take(self, data: bytes) -> bytes:
        """Return the prefix of `data` within the remaining budget."""
        self.full = self.full or len(data) > self._left
        kept = data[: self._left]
        self._left -= len(kept)
        return kept


class Confined:
    """Command running in a sandbox, with an event loop over its pipes. The caller must always call end().

    inside: builds the command from the number of a descriptor that it inherits, whose other end is `results`.
    inherited: further descriptors that the command inherits under the same numbers.
    one_output: merge stderr into stdout.

    Raises: SandboxError if it cannot be started.
    """

    def __init__(
        self,
        confinement: Confinement,
        inside: Callable[[int], list[str]],
        limits: RunLimits,
        *,
        inherited: Sequence[int] = (),
        one_output: bool = False,
    ) -> None:
        self._confinement = confinement
        self._budgets: list[Budget] = []
        self._num_open = 0
        with ExitStack() as undo:
            self._memory = limit_memory(limits.memory_mib * MIB)
            undo.callback(self._memory.close)
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self.results, writer = os.pipe()
            undo.callback(os.close, self.results)
            try:
                stderr = subprocess.STDOUT if one_output else subprocess.PIPE
                self.process = self._start(inside(writer), limits, (*inherited, writer), stderr)
            finally:
                os.close(writer)  # `results` reaches its end only when no process holds the other end any more
            self._release = undo.pop_all()

    def _start(
        self, inside: list[str], limits: RunLimits, inherited: Sequence[int], stderr: int
    ) -> subprocess.Popen[bytes]:
        command, descriptors = self._confinement.command(inside, limits)
        try:
            # PR_SET_PDEATHSIG fires when the starting thread ends, so a permanent thread starts all sandboxes.
            started = _starter().submit(
                subprocess.Popen,
                [*self._memory.prefix, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=(*inherited, *descriptors),
                # The process group is killed as a whole, and Ctrl-C does not reach the sandbox.
                start_new_session=True,
                # Code inside can read the environment of process 1 of its namespace.
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                cwd="/",
            )
            return started.result()
        except OSError as error:
            raise SandboxError(f"the sandbox did not start: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def send(self, data: bytes, *, close: bool) -> None:
        """Queue `data` for stdin, written while the loop runs. close: close stdin afterwards."""
        stream, unsent = self.process.stdin, memoryview(data)
        assert stream is not None
        # A blocking write of more than the pipe holds would stop the loop, and with it the time limit.
        os.set_blocking(stream.fileno(), False)

        def write() -> None:
            nonlocal unsent
            try:
                unsent = unsent[os.write(stream.fileno(), unsent[:_CHUNK_BYTES]) :]
            except BrokenPipeError:  # the program does not have to read its input
                unsent = memoryview(b"")
            if not unsent:
                self._selector.unregister(stream)
                if close:
                    stream.close()

        self._selector.register(stream, selectors.EVENT_WRITE, write)

    def receive(self, source: int | IO[bytes] | None, budget: Budget) -> bytearray:
        """Read from `source` (`results`, or an output of `process`) while the loop runs. Returns the buffer, which
        grows up to the budget."""
        assert source is not None
        received = bytearray()

        def read() -> None:
            data = os.read(key.fd, _CHUNK_BYTES)
            received.extend(budget.take(data))
            if not data:
                self._selector.unregister(source)
                self._num_open -= 1

        self._budgets.append(budget)
        key = self._selector.register(source, selectors.EVENT_READ, read)
        self._num_open += 1
        return received

    def until(self, done: Callable[[], bool], seconds: float) -> Why:
        """Run the loop until `done` returns True, a limit is exceeded, or all streams have ended."""
        deadline = time.monotonic() + seconds
        next_check = time.monotonic() + _MEMORY_CHECK_SECONDS
        while self._num_open and not done():
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= next_check:
                # Not after every event: without control groups, a check reads the memory of every process.
                if self.memory_exceeded():
                    return "memory"
                next_check = time.monotonic() + _MEMORY_CHECK_SECONDS
            self._poll(min(deadline, next_check) - now)
            if self._is_full():
                return "output"
        return "exit"

    def drain(self) -> Why:
        """Read data that is already available, without waiting."""
        # A cell's result has its own pipe and can arrive before output that the program wrote earlier.
        while self._poll(0):
            if self._is_full():
                return "output"
        return "exit"

    def memory_exceeded(self) -> bool:
        """Return whether all processes together exceed or exceeded their memory limit."""
        return self._memory.exceeded(self.process.pid)

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`. Returns whether the command has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def kill(self) -> None:
        """Kill the command. Readers of its pipes then see the end of the stream."""
        if self.process.poll() is None:
            self._confinement.stop(self.process)

    def end(self) -> int:
        """Kill remaining processes and release resources. Returns the exit code, 128 + N after signal N. Idempotent."""
        self.kill()
        try:
            self.process.wait(_END_SECONDS)
        finally:
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            self._release.close()
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def _poll(self, seconds: float) -> bool:
        ready = self._selector.select(seconds)
        for key, _ in ready:
            key.data()
        return bool(ready)

    def _is_full(self) -> bool:
        return any(budget.full for budget in self._budgets)


@cache
def _starter() -> ThreadPoolExecutor:
    """Return the thread that starts sandboxes; it lives as long as this process."""
    return ThreadPoolExecutor(1, thread_name_prefix="sandbox")


# A forked child has no copy of the thread, so it must start its own.
os.register_at_fork(after_in_child=_starter.cache_clear)
