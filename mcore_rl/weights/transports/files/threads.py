"""Threads that copy files. They are daemons: a file server that does not answer must not keep a process alive, whereas
Python waits for the threads of concurrent.futures before it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class CopyThreads(Generic[T]):
    """Runs calls in up to `num_threads` threads, in the order in which they are submitted."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._calls: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()
        """Calls that have not begun. None ends the threads."""
        self._has_ended = False
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` in a thread. Raises: RuntimeError after `finish` and `close`."""
        future: Future[T] = Future()
        with self._lock:  # a call behind None would never run
            if self._has_ended:
                raise RuntimeError("the threads that copy files have ended")
            self._calls.put((future, call))
        if len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._run, name="copy weight files", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def finish(self) -> None:
        """End the threads after the calls that were submitted, without waiting for them."""
        with self._lock:
            self._has_ended = True
            self._calls.put(None)

    def close(self, *, wait: bool) -> None:
        """Cancel the calls that have not begun, and end the threads. wait: until the calls that run have ended."""
        while True:
            try:
                entry = self._calls.get_nowait()
            except Empty:
                break
            if entry is not None:
                entry[0].cancel()
        self.finish()
        if wait:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, call = entry
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del entry, future, call  # the content of a file must not stay in memory until the next call
        self._calls.put(None)  # for the other threads
