"""Threads that copy files, and waits for them that end if the file server does not answer.

The threads are daemons: a copy that hangs must not keep a process alive, whereas Python waits for the threads of
concurrent.futures before it ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from mcore_rl.errors import StorageError

T = TypeVar("T")
U = TypeVar("U")

GRACE_SECONDS = 5.0
"""Time after the timeout in which a better explanation may come, such as the name of a sender that wrote nothing."""


class CopyThreads(Generic[T]):
    """Runs calls in up to `num_threads` threads, in the order in which they are submitted. timeout_seconds: maximum
    time without a call that ends."""

    def __init__(self, num_threads: int, timeout_seconds: float) -> None:
        self._num_threads = num_threads
        self._timeout_seconds = timeout_seconds
        self._threads: list[threading.Thread] = []
        self._calls: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()
        """Calls that have not begun. None ends the threads."""
        self._num_unfinished = 0
        self._progressed = time.monotonic()
        """Time at which a call ended last, or at which the first one was submitted after a pause."""
        self._has_ended = False
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` in a thread. Raises: RuntimeError after `finish` and `close`."""
        future: Future[T] = Future()
        with self._lock:  # a call behind None would never run
            if self._has_ended:
                raise RuntimeError("the threads that copy files have ended")
            if not self._num_unfinished:
                self._progressed = time.monotonic()
            self._num_unfinished += 1
            self._calls.put((future, call))
        if len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._run, name="copy weight files", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def wait(self, future: Future[U], file: str) -> U:
        """Return the result of a call of these threads, or one that depends on them. `file`: its file, for the error.

        Raises: the call's error; StorageError if no call ends within the timeout.
        """
        while not future.done():
            try:
                return future.result(max(0.0, self._seconds_left()))
            except TimeoutError:
                if not future.done():
                    self.require_progress(file)
        return future.result()

    def require_progress(self, file: str) -> None:
        """Raises: StorageError naming `file` if no call has ended within the timeout."""
        if self._seconds_left() <= 0:
            raise StorageError(
                f"{file}: no answer within {self._timeout_seconds:g} s (cluster.collective_timeout_seconds); check "
                "that every host reaches the storage of weights.directory, and raise the timeout if it is slow"
            )

    def note_progress(self) -> None:
        """Begin the timeout again."""
        self._progressed = time.monotonic()

    def finish(self) -> None:
        """End the threads after the calls that were submitted, without waiting for them."""
        with self._lock:
            self._has_ended = True
            self._calls.put(None)

    def close(self, *, wait: bool) -> None:
        """Cancel the calls that have not begun, and end the threads. wait: until the calls that run have ended, or the
        timeout."""
        while True:
            try:
                entry = self._calls.get_nowait()
            except Empty:
                break
            if entry is not None:
                entry[0].cancel()
        self.finish()
        for thread in self._threads if wait else ():
            thread.join(max(0.0, self._seconds_left()))

    def _seconds_left(self) -> float:
        return self._progressed + self._timeout_seconds + GRACE_SECONDS - time.monotonic()

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, call = entry
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            with self._lock:
                self._num_unfinished -= 1
                self._progressed = time.monotonic()
            del entry, future, call  # the content of a file must not stay in memory until the next call
        self._calls.put(None)  # for the other threads
