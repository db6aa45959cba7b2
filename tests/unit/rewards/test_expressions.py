"""Comparison by math-verify stays within its limits and restores process-wide state."""

from __future__ import annotations

import resource
import signal
import threading

import pytest

from mcore_rl.rewards.expressions import MAX_BYTES, is_small, within_limits
from mcore_rl.rewards.processes.deadline import Deadline, DeadlineExceeded

SMALL = [
    *("x^2+2x+1", r"\frac{\sqrt{1+\sqrt{5}}}{2}", r"3x^2y^2", "2^{100}", "52!", r"\binom{20}{3}", r"(x+1)^{10}"),
    *(r"\left( \frac{3}{2}, -13 \right)", r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}"),
    "x^8 + x^7 + x^6 + x^5 + x^4 + x^3 + x^2 + x + 1",
    r"5\9",
]
LARGE = [
    r"\sqrt{" * 30 + "2" + "}" * 30,
    "(" * 100 + "x" + ")" * 100,
    r"9^{999\cdot999}",
    "2^{999!}",
    "(x+1)^{999}",
    "(x+y+z+1)^{20}",
    "9^{9^9}",
    "9^9^9",
    "10^8!",
    "99!!",
    r"\binom{10^8}{10^7}",
    r"\sum_{n=1}^{10^8} 2^n",
    r"\begin{pmatrix}1&2\\3&x\end{pmatrix}^{999}",
    r"\frac{1}{99999!}",
    "0.1^{99999}",
    "(2^{99})^{99}",
    "x" * 500,
]


@pytest.mark.parametrize("text", SMALL)
def test_answers_that_are_compared(text):
    assert is_small(text)


@pytest.mark.parametrize("text", LARGE)
def test_answers_that_would_take_too_much_are_not_even_parsed(text):
    assert not is_small(text)


def forever() -> bool:
    while True:
        try:
            sum(range(1000))
        except Exception:
            return True


def test_endless_comparison_is_wrong_and_keeps_callers_alarm(monkeypatch):
    monkeypatch.setattr("mcore_rl.rewards.expressions.MAX_SECONDS", 0.05)
    outer = Deadline(600.0)
    assert outer.call(within_limits, forever) is False
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_the_callers_deadline_is_not_taken_for_a_wrong_answer():
    with pytest.raises(DeadlineExceeded):
        Deadline(0.05).call(within_limits, forever)


def test_comparison_above_memory_limit_is_wrong_and_resets_limit():
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert within_limits(lambda: bool(bytearray(MAX_BYTES // 4)))
    assert not within_limits(lambda: bool(bytearray(2 * MAX_BYTES)))
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_threads_that_cannot_have_an_alarm_compare_all_the_same():
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(within_limits(lambda: True)))
    thread.start()
    thread.join()
    assert results == [True]
