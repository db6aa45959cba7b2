"""Execution of one command: packs its files, runs it, and collects output and files, with limits of size, time and
memory."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping
from typing import IO

from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.confinement.commands import Confinement, in_memory
from mcore_rl.sandbox.confinement.limits import MIB, RunLimits
from mcore_rl.sandbox.confinement.start import KILLED, Confined
from mcore_rl.sandbox.interface import Outcome, Why
from mcore_rl.sandbox.parcels import READY, RUN, check_path, pack, unpack

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


class PipeLoop:
    """Event loop over the pipes of a running sandbox."""

    def __init__(self, confined: Confined) -> None:
        self._confined = confined
        self._selector = selectors.DefaultSelector()
        self._budgets: list[Budget] = []
        self._num_open = 0

    def close(self) -> None:
        self._selector.close()

    def send(self, stream: IO[bytes], data: bytes, *, close: bool) -> None:
        """Queue `data` for writing while the loop runs. close: close the stream afterwards."""
        unsent = memoryview(data)
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

    def receive(self, descriptor: int, budget: Budget) -> bytearray:
        """Read from `descriptor` while the loop runs. Returns the buffer, which grows up to the budget."""
        received = bytearray()

        def read() -> None:
            data = os.read(descriptor, _CHUNK_BYTES)
            received.extend(budget.take(data))
            if not data:
                self._selector.unregister(descriptor)
                self._num_open -= 1

        self._budgets.append(budget)
        self._selector.register(descriptor, selectors.EVENT_READ, read)
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
                if self._confined.memory_exceeded():
                    return "memory"
                next_check = time.monotonic() + _MEMORY_CHECK_SECONDS
            self._poll(min(deadline, next_check) - now)
            if any(budget.full for budget in self._budgets):
                return "output"
        return "exit"

    def drain(self) -> Why:
        """Read data that is already available, without waiting."""
        while self._poll(0):
            if any(budget.full for budget in self._budgets):
                return "output"
        return "exit"

    def _poll(self, seconds: float) -> bool:
        ready = self._selector.select(seconds)
        for key, _ in ready:
            key.data()
        return bool(ready)


def execute(
    confinement: Confinement,
    command: list[str],
    limits: RunLimits,
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes],
    fetch: tuple[str, ...] = (),
) -> Outcome:
    """Run a command in a new sandbox. Raises: SandboxError if it did not start."""
    names = [check_path(name) for name in fetch]
    parcel = in_memory("files", pack(files))
    reader, writer = os.pipe()
    inside = ["/bin/bash", "-c", RUN, "sandbox", str(parcel), str(writer), str(len(names)), *names, *command]
    try:
        try:
            confined = Confined(confinement, inside, limits, inherited=(parcel, writer))
        finally:
            os.close(parcel)
            os.close(writer)
        return _follow(confined, limits, stdin, reader, fetch)
    finally:
        os.close(reader)


def _follow(confined: Confined, limits: RunLimits, stdin: bytes, parcel: int, fetch: tuple[str, ...]) -> Outcome:
    started = time.monotonic()
    process, pipes, output = confined.process, PipeLoop(confined), Budget(limits.output_kib << 10)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        pipes.send(process.stdin, stdin, close=True)
        stdout = pipes.receive(process.stdout.fileno(), output)
        stderr = pipes.receive(process.stderr.fileno(), output)
        packed = pipes.receive(parcel, Budget((limits.tmp_mib + 1) * MIB))
        why = pipes.until(lambda: False, limits.seconds)
        if why == "exit" and not confined.wait(max(0.0, limits.seconds - (time.monotonic() - started))):
            why = "timeout"
        if confined.memory_exceeded():
            why = "memory"
    finally:
        pipes.close()
        code = confined.end()
    message = stderr.decode("utf-8", "replace")
    if why == "exit" and not packed.startswith(READY):
        raise SandboxError(f"the sandbox did not start: {message.strip() or f'it ended with code {code}'}")
    return Outcome(
        why=why,
        return_code=code if why == "exit" else KILLED,
        stdout=stdout.decode("utf-8", "replace"),
        stderr=message,
        seconds=time.monotonic() - started,
        files=unpack(bytes(packed[len(READY) :]), fetch) if why == "exit" else {},
    )
