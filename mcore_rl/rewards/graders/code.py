"""Graders of programs that a model wrote, which run in the sandbox.

- Competition problems (APPS, Hendrycks et al., arXiv 2105.09938; TACO, Li et al., arXiv 2312.14852; CodeContests, Li
  et al., arXiv 2203.07814; LiveCodeBench, Jain et al., arXiv 2403.07974; Codeforces): tests are inputs and outputs. The
  reward is the fraction of the first ten tests that pass, as in verl; the response is correct if all of them pass. With
  `fn_name`, an input holds a function's arguments and an output its result.
- HumanEval (Chen et al., arXiv 2107.03374), MBPP (Austin et al., arXiv 2108.07732), KodCode (Xu et al., arXiv
  2503.02951): 1 if all assertions hold, else 0.

A program never decides its own verdict. Outputs and results are compared in the grading process. Assertions run in a
separate process inside the sandbox, which calls the program in another process (programs/tester.py).
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict

from mcore_rl.rewards.graders.programs import truths
from mcore_rl.rewards.graders.programs.bundle import bundle
from mcore_rl.rewards.graders.programs.comparison import same_output, same_result
from mcore_rl.rewards.graders.programs.extraction import extract_program
from mcore_rl.rewards.graders.programs.tester import LACKS, NO_FIXTURE, UNPROTECTED
from mcore_rl.sandbox.interface import Outcome, Program
from mcore_rl.types import Score

MAX_TESTS = 10
MAX_TEST_SECONDS = 10.0
SHARE_OF_TIME = 0.9
"""Fraction of a response's time limit for running programs; the rest is for process starts and comparisons."""
# Errors for the tester's reports that no verdict is possible.
_NO_VERDICT = {
    UNPROTECTED: "sandbox.python cannot hide the tests from the program (prctl by ctypes); set another",
    NO_FIXTURE: "the tests of the ground truth use the fixture {names}, which this grader does not provide (it has "
    "tmp_path, tmpdir, capsys and fixtures that the tests define); rewrite the tests or drop the row",
    LACKS: "the tests of the ground truth import {names}, which sandbox.python lacks; set it to a Python that has "
    "them, with sandbox.read_only",
}


RunProgram = Callable[[Program], Outcome]
"""Sandbox.run. It raises only for faults that the program did not cause; grading of the response then fails."""


def grade_outputs(response: str, ground_truth: object, run: RunProgram, seconds: float) -> Score:
    """Score the fraction of passed tests.

    ground_truth: a form of programs.truths.read_examples, or its JSON text. seconds: time limit of all tests.

    Raises: ValueError for a ground truth of another form.
    """
    examples = truths.read_examples(ground_truth)
    tests = examples.tests[:MAX_TESTS]
    program = extract_program(response)
    if program is None:
        return _share(0, len(tests))
    if examples.name is None:
        source, encoded, same = bundle("script", program), truths.as_text, same_output
    else:
        source, encoded, same = bundle("call", program, examples.name), truths.encoded_arguments, same_result
    end, passed = time.monotonic() + SHARE_OF_TIME * seconds, 0
    for given, expected in tests:
        left = min(MAX_TEST_SECONDS, end - time.monotonic())
        if left <= 0:
            break  # the remaining tests have failed
        outcome = run(Program(source, stdin=encoded(given), seconds=left))
        passed += outcome.ok and same(outcome.stdout, expected)
    return _share(passed, len(tests))


def grade_asserts(response: str, ground_truth: object, run: RunProgram, seconds: float) -> Score:
    """Score 1 if all assertions hold, else 0.

    ground_truth: a form of programs.truths.read_assertions, or its JSON text. seconds: time limit of all assertions.

    Raises: ValueError for a ground truth of another form.
    """
    tests = truths.read_assertions(ground_truth)
    program = extract_program(response)
    if program is None:
        return Score(0.0, 0.0)
    # The program cannot print the secret, because only the tester's process knows it.
    secret = secrets.token_hex(32)
    limit = min(MAX_TEST_SECONDS, SHARE_OF_TIME * seconds)
    outcome = run(Program(bundle("tester"), stdin=_request(tests, program, secret), seconds=limit))
    verdict = outcome.stdout.rstrip().rpartition("\n")[2]
    report, _, end = verdict.rpartition(" ")
    cause, _, names = report.partition(" ")
    if end == secret and cause in _NO_VERDICT:
        raise RuntimeError(_NO_VERDICT[cause].format(names=names))
    right = float(outcome.ok and verdict == secret)
    return Score(right, right)


def _share(passed: int, tests: int) -> Score:
    return Score(passed / tests, float(passed == tests), parts={"tests_passed": float(passed), "tests": float(tests)})


def _request(tests: truths.Assertions, program: str, secret: str) -> str:
    """Return the tester's standard input. Tests are not in its source, because the program can read the source."""
    name = re.match(r"\w*", tests.entry_point or "")
    root = name[0] if name else ""
    defined = re.search(rf"^(?:(?:async )?def|class) {root}\b|^{root}\s*[:=]", program, re.MULTILINE)
    if root and not defined:  # the program continues the prompt
        program = tests.prompt + program
    return json.dumps({**asdict(tests), "program": program, "candidate": bundle("candidate"), "secret": secret})
