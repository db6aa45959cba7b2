"""Reads what a sandbox writes and counts it, feeds it, and says when a limit is reached."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from typing import IO

from mcore_rl.sandbox.confinement.start import Confined
from mcore_rl.sandbox.interface import Why

_CHUNK_BYTES = 1 << 16
_MEMORY_SECONDS = 0.05
"""Between two looks at the memory of all processes."""


class Budget:
    """Bytes that some streams may bring together; `full` once there were more."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.renew()

    def renew(self) -> None:
        self._left = self._limit_bytes
        self.full = False

    def take(self, data: bytes) -> bytes:
        """As much of `data` as there is room for."""
        self.full = self.full or len(data) > self._left
        kept = data[: self._left]
        self._left -= len(kept)
        return kept


class Exchange:
    """The streams of a started sandbox."""

    def __init__(self, confined: Confined) -> None:
        self._confined = confined
        self._selector = selectors.DefaultSelector()
        self._budgets: list[Budget] = []
        self._num_open = 0

    def close(self) -> None:
        self._selector.close()

    def send(self, stream: IO[bytes], data: bytes, *, close: bool) -> None:
        """Writes `data` while others are read, as far as anyone reads it. close: the stream ends with it."""
        unsent = memoryview(data)
        os.set_blocking(stream.fileno(), False)

        def write() -> None:
            nonlocal unsent
            try:
                unsent = unsent[os.write(stream.fileno(), unsent[:_CHUNK_BYTES]) :]
            except BrokenPipeError:  # a program need not read its input
                unsent = memoryview(b"")
            if not unsent:
                self._selector.unregister(stream)
                if close:
                    stream.close()

        self._selector.register(stream, selectors.EVENT_WRITE, write)

    def receive(self, descriptor: int, budget: Budget) -> bytearray:
        """What comes there from now on, as far as the budget goes."""
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
        """Goes on until `done` or a limit, or everything that is read has ended."""
        deadline = time.monotonic() + seconds
        next_look = time.monotonic() + _MEMORY_SECONDS
        while self._num_open and not done():
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= next_look:
                if self._confined.memory_exceeded():
                    return "memory"
                next_look = time.monotonic() + _MEMORY_SECONDS
            self._turn(min(deadline, next_look) - now)
            if any(budget.full for budget in self._budgets):
                return "output"
        return "exit"

    def drain(self) -> Why:
        """Takes what is there already."""
        while self._turn(0):
            if any(budget.full for budget in self._budgets):
                return "output"
        return "exit"

    def _turn(self, seconds: float) -> bool:
        ready = self._selector.select(seconds)
        for key, _ in ready:
            key.data()
        return bool(ready)
