import threading
import time
from types import SimpleNamespace

import pytest

from mcore_rl.runtime import spans
from mcore_rl.runtime.spans import SpanRecorder
from mcore_rl.types import Span


def test_span_uses_the_unix_clock_and_is_drained_once():
    recorder = SpanRecorder("actor 3")
    before = time.time()
    with recorder.span("update"):
        time.sleep(0.02)
    after = time.time()
    (span,) = recorder.drain()
    assert (span.name, span.process) == ("update", "actor 3")
    assert before <= span.start < span.end <= after + 0.01
    assert span.end - span.start >= 0.02
    assert recorder.drain() == []


def test_span_of_a_block_that_raises_is_recorded():
    recorder = SpanRecorder("driver")
    with pytest.raises(RuntimeError, match="died"), recorder.span("update"):
        raise RuntimeError("died")
    assert [span.name for span in recorder.drain()] == ["update"]


def test_span_with_clock_set_back_is_not_negative(monkeypatch):
    recorder = SpanRecorder("driver")
    clock = iter([100.0, 50.0])
    monkeypatch.setattr(spans, "time", SimpleNamespace(time=lambda: next(clock), perf_counter=time.perf_counter))
    with recorder.span("update"):
        pass
    (span,) = recorder.drain()
    assert span.start == 100.0
    assert span.end >= span.start


def test_span_recorder_is_thread_safe():
    recorder = SpanRecorder("driver")
    drained: list[Span] = []

    def work():
        for _ in range(500):
            with recorder.span("a"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained += recorder.drain()
        time.sleep(0.001)
    assert len(drained + recorder.drain()) == 2000
