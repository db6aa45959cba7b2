"""The thread of a tracker: it never blocks or fails the run, and counts lost entries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from mcore_rl.observe.trackers.delivery import StepEntry, TrackerThread
from tests.unit.observe.trackers.recorded import FakeTracker


def start(open_tracker: Callable[[], FakeTracker], capacity: int = 8) -> TrackerThread:
    return TrackerThread("fake", open_tracker, lambda step: [], capacity)


def put(thread: TrackerThread, steps: range) -> None:
    for step in steps:
        thread.put(StepEntry(step, {"loss": 1.0}))


def close(thread: TrackerThread, *, failed: bool = False, seconds: float = 60) -> list[str]:
    thread.request_close(failed=failed)
    return thread.join(time.monotonic() + seconds)


def test_delivery_sends_in_order_from_one_other_thread() -> None:
    tracker = FakeTracker()
    thread = start(lambda: tracker)
    put(thread, range(5))
    assert close(thread, failed=True) == []
    assert tracker.steps == [0, 1, 2, 3, 4]
    assert tracker.closed == [True]
    assert len(tracker.threads - {threading.get_ident()}) == 1


@pytest.mark.parametrize("error", [ValueError("the server\nis gone"), SystemExit("the server is gone")])
def test_delivery_error_is_reported_once_and_counted(error: BaseException) -> None:
    tracker = FakeTracker(fails_at=(1, 2), error=error)
    thread = start(lambda: tracker)
    put(thread, range(4))
    (summary,) = close(thread)
    assert tracker.steps == [0, 3]
    reason = f"{type(error).__name__}: the server is gone"
    assert thread.news() == [f"tracker fake: {reason}; the run continues"]
    assert thread.news() == []
    assert summary == f"tracker fake: 2 entries sent, 2 failed; first error: {reason}"


def test_delivery_full_queue_drops_entries_at_once() -> None:
    release, tracker = threading.Event(), FakeTracker()

    def hang() -> FakeTracker:
        release.wait()
        return tracker

    thread = start(hang, capacity=2)
    put(thread, range(10))  # returns although the tracker hangs until `release`
    (line,) = thread.news()
    assert "is slower than the run: steps are left out of it while 2 entries wait" in line
    thread.request_close(failed=False)  # makes room in the full queue
    release.set()
    (summary,) = thread.join(time.monotonic() + 60)
    sent = len(tracker.steps)
    assert summary == f"tracker fake: {sent} entries sent, {10 - sent} dropped"
    assert tracker.closed == [False]


def test_delivery_opens_again_with_the_next_entry() -> None:
    tracker, attempts = FakeTracker(), []

    def open_tracker() -> FakeTracker:
        attempts.append(len(attempts))
        if len(attempts) < 3:
            raise ConnectionError("no route to host")
        return tracker

    thread = start(open_tracker)
    put(thread, range(4))
    while len(tracker.steps) < 2:  # otherwise the end of the run could come first
        time.sleep(0.01)
    (summary,) = close(thread)
    assert tracker.steps == [2, 3]
    assert summary.startswith("tracker fake: 2 entries sent, 2 failed")


def test_delivery_unreachable_server_is_not_tried_at_the_end() -> None:
    attempts, failing = [], threading.Event()

    def open_tracker() -> FakeTracker:
        attempts.append(len(attempts))
        failing.wait(30)
        raise ConnectionError("no route to host")

    thread = start(open_tracker)
    put(thread, range(5))
    while not attempts:
        time.sleep(0.01)
    thread.request_close(failed=False)
    failing.set()
    (summary,) = thread.join(time.monotonic() + 60)
    assert attempts == [0]
    assert summary == "tracker fake: 0 entries sent, 5 failed; first error: ConnectionError: no route to host"


def test_delivery_that_hangs_at_the_end_is_given_up() -> None:
    release = threading.Event()

    class Hanging(FakeTracker):
        def close(self, *, failed: bool) -> None:
            release.wait(30)

    thread = start(Hanging)
    put(thread, range(1))
    (summary,) = close(thread, seconds=0.2)
    assert "did not end in time" in summary
    release.set()
    assert thread.join(time.monotonic() + 60) == []


def test_delivery_unread_responses_lose_no_metrics() -> None:
    def read(step: int) -> list[object]:
        if step == 1:
            raise OSError(5, "Input/output error")
        return []

    tracker = FakeTracker()
    thread = TrackerThread("fake", lambda: tracker, read)  # type: ignore[arg-type]
    put(thread, range(3))
    (summary,) = close(thread)
    assert tracker.steps == [0, 1, 2]
    assert "1 failed; first error: OSError" in summary
