"""Delivery of a run's entries to one tracker, by a thread behind a bounded queue."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mcore_rl.observe.trackers.interface import SampledResponse, Tracker

CAPACITY = 256
"""Entries that wait for one tracker; an entry has about 200 numbers."""
MAX_REASON = 300
"""Characters of an error in a message."""


@dataclass(frozen=True)
class StepEntry:
    """Metrics of one step, all of them finite."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CloseRequest:
    """Last item of a queue."""

    failed: bool


class TrackerThread:
    """Opens one tracker and sends it the entries of a run, without ever blocking or failing the caller.

    A full queue drops new entries. An entry fails if the tracker cannot be opened or raises; with the next entry the
    tracker is opened again, or continues. Dropped and failed entries are counted: `news` returns a line about the first
    of each kind, and `close` returns their numbers.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        read_responses: Callable[[int], Sequence[SampledResponse]],
        capacity: int = CAPACITY,
    ) -> None:
        """Start the thread. `read_responses` returns the sampled responses of a step; the thread calls it."""
        self._name, self._open, self._read_responses = name, open_tracker, read_responses
        self._entries: queue.Queue[StepEntry | CloseRequest] = queue.Queue(capacity)
        self._tracker: Tracker | None = None
        self._first_error: str | None = None
        self._sent, self._failed, self._dropped, self._close_failed = 0, 0, 0, False
        self._closing = False
        self._reported: set[str] = set()
        # A daemon: a tracker that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._deliver, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, entry: StepEntry) -> None:
        """Queue an entry, or drop it if the queue is full."""
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            self._dropped += 1

    def news(self) -> list[str]:
        """Return a line about the first failed and the first dropped entry, once each."""
        lines = {}
        if self._first_error is not None:
            lines["failed"] = f"tracker {self._name}: {self._first_error}; the run continues"
        if self._dropped:
            lines["dropped"] = (
                f"tracker {self._name} is slower than the run: steps are left out of it while {self._entries.maxsize} "
                "entries wait; the run continues"
            )
        new = [line for kind, line in lines.items() if kind not in self._reported]
        self._reported |= set(lines)
        return new

    def request_close(self, *, failed: bool) -> None:
        """Let the thread send the queued entries, close the tracker, and end. Returns at once."""
        request, self._closing = CloseRequest(failed), True
        while True:
            try:
                self._entries.put_nowait(request)
                return
            except queue.Full:
                # Nobody else puts entries any more, so one of the oldest makes room.
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        try:
            self._entries.get_nowait()
        except queue.Empty:  # the thread has taken it meanwhile
            return
        self._dropped += 1

    def join(self, deadline: float) -> list[str]:
        """Wait for the thread until `deadline` (time.monotonic()). Returns a summary of lost entries, if any."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        lost = [f"{count} {kind}" for kind, count in (("failed", self._failed), ("dropped", self._dropped)) if count]
        if self._thread.is_alive():
            lost.append(f"{self._entries.qsize()} or more not sent, because it did not end in time")
        if self._close_failed:
            lost.append("it could not be closed")
        if not lost:
            return []
        reason = f"; first error: {self._first_error}" if self._first_error is not None else ""
        return [f"tracker {self._name}: {self._sent} entries sent, {', '.join(lost)}{reason}"]

    def _deliver(self) -> None:
        while not isinstance(entry := self._entries.get(), CloseRequest):
            if self._try(partial(self._send, entry)):
                self._sent += 1
            else:
                self._failed += 1
        if self._tracker is not None:
            self._close_failed = not self._try(partial(self._tracker.close, failed=entry.failed))

    def _send(self, entry: StepEntry) -> None:
        if self._tracker is None:
            # An unreachable server would cost its time limit for every entry that is left.
            if self._closing and self._failed:
                raise ConnectionError("not opened again at the end of the run")
            self._tracker = self._open()
        try:
            responses = self._read_responses(entry.step)
        except (OSError, ValueError):
            # The entry counts as failed, but its metrics are not lost.
            self._tracker.append(entry.step, entry.metrics, [])
            raise
        self._tracker.append(entry.step, entry.metrics, responses)

    def _try(self, call: Callable[[], None]) -> bool:
        """Call a tracker. Returns False if it raised."""
        try:
            call()
        # Every error of a tracker, including its attempts to exit, is counted: none may reach the run.
        except (Exception, SystemExit) as error:
            if self._first_error is None:
                reason = " ".join(str(error).split()) or "no message"
                self._first_error = f"{type(error).__name__}: {reason}"[:MAX_REASON]
            return False
        return True
