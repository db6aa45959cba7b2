"""Programs that a model wrote, judged by what they print or by assertions; they run where a CodeRunner runs them.

- Competition problems (APPS, Hendrycks et al., arXiv 2105.09938; TACO, Li et al., arXiv 2312.14852; CodeContests, Li
  et al., arXiv 2203.07814; Codeforces): inputs and outputs; the score is the share of the first ten that pass, as verl
  counts it, and right is who passes them all. With `fn_name`, an input holds a function's arguments, one JSON value
  on a line, and an output the value that it returns.
- HumanEval (Chen et al., arXiv 2107.03374) and MBPP (Austin et al., arXiv 2108.07732): all assertions hold, or 0.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mcore_rl.rewards.graders.harness import calls_function, ends_with_mark
from mcore_rl.types import Score

MAX_TESTS = 10
MAX_TEST_SECONDS = 10.0
SHARE_OF_TIME = 0.9
"""Of a response's seconds for all that runs; what is left is for starting and comparing."""
_FENCE = "```"
_PYTHON = re.compile(r"```[ \t]*(?:python3?|py)[ \t]*\r?\n", re.IGNORECASE)


class CodeOutcome(NamedTuple):
    """What a program printed, and whether it ended by itself, in time and with exit code 0."""

    stdout: str
    ok: bool


class CodeRunner(Protocol):
    """Runs Python programs that nobody trusts, apart from this process and from each other."""

    def run(self, source: str, stdin: str, seconds: float) -> CodeOutcome:
        """Runs a program to its end, or kills it after `seconds`. It raises only for what is not the program's fault:
        the sample then could not be graded."""


@dataclass(frozen=True)
class CodeGrader:
    """seconds: for one response."""

    runner: CodeRunner
    seconds: float

    def grade_outputs(self, response: str, ground_truth: Any) -> Score:
        """The share of passed tests. ground_truth: {"inputs": [...], "outputs": [...], "fn_name": optional}, or that
        as JSON.

        Raises: ValueError for a ground truth of another form.
        """
        tests = _mapping(ground_truth, "inputs", "outputs")
        inputs, outputs = list(tests["inputs"])[:MAX_TESTS], list(tests["outputs"])[:MAX_TESTS]
        if not inputs or len(tests["inputs"]) != len(tests["outputs"]):
            raise ValueError(f"ground truth with {len(inputs)} inputs and {len(outputs)} outputs")
        program = extract_program(response)
        if program is None:
            return _share(0, len(inputs))
        name, passed = tests.get("fn_name"), 0
        source = program if name is None else calls_function(program, str(name))
        clock = _Clock(self.seconds)
        for given, expected in zip(inputs, outputs, strict=True):
            if clock.left <= 0:
                break  # the tests that are left have failed
            stdin = _as_stdin(given, by_lines=name is not None)
            printed, ok = self.runner.run(source, stdin, clock.left)
            passed += ok and (same_output(printed, str(expected)) if name is None else _same_value(printed, expected))
        return _share(passed, len(inputs))

    def grade_asserts(self, response: str, ground_truth: Any) -> Score:
        """1 or 0. ground_truth: HumanEval's {"test", "entry_point", "prompt": optional} or MBPP's {"test_list",
        "test_setup_code" and "test_imports": optional}, or that as JSON.

        Raises: ValueError for a ground truth of another form.
        """
        program = extract_program(response)
        source = _with_asserts(program or "", _mapping(ground_truth))
        if program is None:
            return Score(0.0, 0.0)
        # A program may end itself with exit code 0 before an assertion fails: only what comes behind the last counts.
        mark = secrets.token_hex(16)
        printed, ok = self.runner.run(ends_with_mark(source, mark), "", _Clock(self.seconds).left)
        right = float(ok and printed.rstrip().endswith(mark))
        return Score(right, right)


def extract_program(response: str) -> str | None:
    """The last fenced block in Python, or the last one of any language; None where there is none."""
    starts = [match.end() for match in _PYTHON.finditer(response)]
    if starts:
        return response[starts[-1] :].partition(_FENCE)[0]
    blocks = [piece.partition("\n")[2] for piece in response.split(_FENCE)[1::2] if "\n" in piece]
    return blocks[-1] if blocks else None


def same_output(printed: str, expected: str) -> bool:
    """Whether outputs are the same but for blanks around lines, empty last lines, and the last digits of decimals."""
    ours, theirs = ([line.strip() for line in text.strip().splitlines()] for text in (printed, expected))
    if len(ours) != len(theirs):
        return False
    return all(one == other or _same_words(one.split(), other.split()) for one, other in zip(ours, theirs, strict=True))


class _Clock:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + SHARE_OF_TIME * seconds

    @property
    def left(self) -> float:
        return min(MAX_TEST_SECONDS, self._end - time.monotonic())


def _share(passed: int, tests: int) -> Score:
    return Score(passed / tests, float(passed == tests), parts={"tests_passed": float(passed), "tests": float(tests)})


def _mapping(ground_truth: Any, *names: str) -> Mapping[str, Any]:
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(tests, Mapping) or any(tests.get(name) is None for name in names):
        raise ValueError(f"the ground truth holds no {' and '.join(names) or 'tests'}: {str(tests)[:80]}")
    return tests


def _with_asserts(program: str, tests: Mapping[str, Any]) -> str:
    if tests.get("test") is not None and tests.get("entry_point"):
        name = str(tests["entry_point"])
        defined = re.search(rf"^(?:async )?def {re.escape(name)}\b", program, re.MULTILINE)
        start = "" if defined else str(tests.get("prompt") or "")
        return "\n".join([start + program, str(tests["test"]), f"check({name})"])
    asserts = tests.get("test_list")
    if asserts is None or not len(asserts):
        raise ValueError("the ground truth holds neither test and entry_point nor test_list")
    imports = [] if tests.get("test_imports") is None else list(tests["test_imports"])
    return "\n".join([program, *map(str, imports), str(tests.get("test_setup_code") or ""), *map(str, asserts)])


def _as_stdin(given: Any, *, by_lines: bool) -> str:
    if isinstance(given, str):
        return given
    values = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(values, Sequence):
        return "\n".join(json.dumps(each) if by_lines else str(each) for each in values)
    return json.dumps(values)


def _same_value(printed: str, expected: Any) -> bool:
    """APPS writes the value itself, or a list with nothing else in it."""
    try:
        returned = json.loads(printed.strip().splitlines()[-1])
        wanted = json.loads(expected) if isinstance(expected, str) else expected
    except (IndexError, ValueError):
        return False
    wanted = wanted.tolist() if hasattr(wanted, "tolist") else wanted
    return bool(returned == wanted or [returned] == wanted)


def _same_words(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) and all(
        one == other or _close(one, other) for one, other in zip(ours, theirs, strict=True)
    )


def _close(one: str, other: str) -> bool:
    if "." not in one + other:
        return False  # whole numbers are exact
    try:
        return math.isclose(float(one), float(other), rel_tol=1e-5, abs_tol=1e-8)
    except ValueError:
        return False
