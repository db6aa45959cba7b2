"""Graders take linear time for any model output: 60,000 characters must not block a grading process."""

from __future__ import annotations

import importlib
import pkgutil
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import mcore_rl.rewards
import mcore_rl.rollout.tools
from mcore_rl.rewards.graders import verl_names
from mcore_rl.rewards.graders.catalogue import PURE
from mcore_rl.rewards.graders.programs.extraction import extract_program
from mcore_rl.rewards.math_grader import is_correct

CHARACTERS = 60_000
ANSWER_CHARACTERS = 500
"""Patterns for one answer get at most twice as many characters: longer answers are cut or compared as text."""
BLANKS_ARE_JOINED = ("mcore_rl.rewards.notation.choices.", "mcore_rl.rewards.answers._JOINT")
"""Patterns for texts without runs of spaces, or for texts of at most 40 characters."""
SECONDS = 3.0
"""Time limit: at 60,000 characters, quadratic time takes at least 5 s and linear time at most 1 s."""
MOST_SECONDS = 10 * SECONDS
"""A call is stopped after this time."""
REFERENCES = 10
"""The limit on a busy machine, in multiples of the time of `reference`, which takes 0.3 s on an idle one."""
UNITS = (
    *(" ", "\n", "1", "a", ".", "-", "\\", "$", "{", "}", "[", "(", "=", "_", "^", "/", "`", "<", "~", "*", "\\dot1"),
    *(
        "\\[",
        "\\boxed{",
        "\\boxed{1},",
        "\\frac{",
        "\\text{",
        "1,000",
        "1 ",
        "a ",
        "and ",
        "answer is ",
        "Answer: ",
        "#### ",
    ),
    *("a=", "1/", "10^", "<think>", "</think>", "<answer>", "```\n", "```python\n", "~~~\n", "$1$ ", "<<1>>", "1,\\!"),
)
BEGINNINGS = ("", "The answer is ", "\\boxed{", "```python\n", "<answer>")
FUNCTIONS: dict[str, Callable[[str], object]] = {
    **{name: lambda text, grade=grade: grade(text, {"target": ["42"]}) for name, grade in PURE.items()},
    "math": lambda text: is_correct(text, "42"),
    "program": extract_program,
    "extract_gsm8k": lambda text: verl_names.extract_gsm8k(text, "flexible"),
    "match_answer": verl_names.match_answer,
    "grade_answer": lambda text: verl_names.grade_answer(text, "42"),
}


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a call, which is stopped beyond the limit. Timeouts and ValueError are ignored."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    began = time.process_time()
    try:
        run()
    except (TimeoutError, ValueError):
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
    return time.process_time() - began


def reference() -> object:
    """Search in vain for a known time, which grows with the load of the machine like other times."""
    return [re.fullmatch("a*a*a*b", "a" * ANSWER_CHARACTERS) for _ in range(10)]


def is_slow(taken: float) -> bool:
    return taken > SECONDS and taken > REFERENCES * seconds(reference)


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield every compiled pattern of the reward and tool modules, so that the test covers new patterns."""
    for package in (mcore_rl.rewards, mcore_rl.rollout.tools):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(found.name)).items():
                yield from ((f"{found.name}.{name}", each) for each in held(value))


def held(value: object) -> Iterator[re.Pattern[str]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from held(each)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_grader_takes_linear_time_for_repeated_text(name: str) -> None:
    grade = FUNCTIONS[name]
    grade("42")  # load imports before the measurement
    slow = {}
    for unit in UNITS:
        for begun in BEGINNINGS:
            text = begun + unit * (CHARACTERS // len(unit))
            if is_slow(taken := seconds(lambda text=text: grade(text))):
                slow[begun, unit] = taken
    assert not slow


@pytest.mark.slow
def test_pattern_of_every_module_takes_no_cubic_time() -> None:
    found = dict(patterns())
    assert len(found) > 60, "the search for patterns finds them no longer"
    slow = {}
    for name, pattern in found.items():
        units = {*UNITS, *re.findall(r"[A-Za-z]{2,}", pattern.pattern)}
        units = {unit for unit in units if unit.strip() or not name.startswith(BLANKS_ARE_JOINED)}
        for text in (unit * (ANSWER_CHARACTERS // len(unit)) for unit in units):
            if is_slow(taken := seconds(lambda text=text, p=pattern: (list(p.finditer(text)), p.fullmatch(text)))):
                slow[name, text[:20]] = taken
    assert not slow
