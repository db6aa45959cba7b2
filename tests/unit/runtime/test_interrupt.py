"""A stop that arrives where its exception is swallowed still stops the run."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from mcore_rl.runtime import health


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    health.forget_signals()


def test_a_swallowed_interrupt_comes_back_at_the_next_wait_once() -> None:
    with pytest.raises(KeyboardInterrupt, match="signal 15"):
        health.interrupt(signal.SIGTERM, None)  # as if a callback had caught it
    with pytest.raises(KeyboardInterrupt, match="signal 15"):
        health.Watch().get(["a reference that is never looked at"])
    assert health.Watch().get([]) == []


def test_a_request_to_stop_interrupts_nothing_and_stays() -> None:
    assert not health.stop_requested()
    health.request_stop(signal.SIGUSR1, None)
    assert health.Watch().get([]) == []
    assert health.stop_requested()
    assert health.stop_requested()


def test_a_new_run_does_not_inherit_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        health.interrupt(signal.SIGINT, None)
    health.forget_signals()
    assert not health._signals
