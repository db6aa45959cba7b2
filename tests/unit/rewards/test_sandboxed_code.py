"""Grading of programs with real grading processes and the sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.rewards.functions import Sample
from mcore_rl.rewards.graders.loading import runs_code
from mcore_rl.rewards.processes.pool import GradingPool
from tests.unit.rewards.trusted import fenced
from tests.unit.sandbox.conftest import working

TESTS = json.dumps({"inputs": ["2 3\n", "10 -4\n"], "outputs": ["5\n", "6\n"]})
HUMAN_EVAL = json.dumps({"test": "def check(f):\n    assert f(3) == 9\n", "entry_point": "square"})


@pytest.mark.slow
def test_programs_are_judged_by_what_they_print_and_reach_nothing(tmp_path: Path) -> None:
    """Programs: correct, correct in one test, writing outside the sandbox, endless; and one with assertions."""
    secret = tmp_path / "touched"
    samples = {
        0: Sample("apps", fenced("a, b = map(int, input().split())\nprint(a + b)"), TESTS, {}),
        1: Sample("apps", fenced("a, b = map(int, input().split())\nprint(abs(a) + abs(b))"), TESTS, {}),
        2: Sample("apps", fenced(f"open({str(secret)!r}, 'w').write('x')\nprint(5)"), TESTS, {}),
        3: Sample("apps", fenced("while True: pass"), TESTS, {}),
        4: Sample("my_humaneval", fenced("def square(x):\n    return x * x"), HUMAN_EVAL, {}),
    }
    config = RewardConfig(function="by_data_source", timeout_seconds=30.0)
    sandbox = SandboxConfig(seconds=6.0)  # 2 s were too short on a busy machine
    working(sandbox)
    pool = GradingPool(config, sandbox)
    try:
        for key, sample in samples.items():
            pool.submit({key: sample})
        scores = pool.collect(list(samples))
    finally:
        pool.shutdown()
    assert [scores[key].error for key in samples] == [None] * 5
    assert [scores[key].reward for key in samples] == [1.0, 0.5, 0.0, 0.0, 1.0]
    assert not secret.exists()


def test_it_is_known_whether_any_row_is_graded_by_running_code() -> None:
    by_source = RewardConfig(function="by_data_source")
    assert runs_code(by_source, ["openai/gsm8k", "apps"])
    assert not runs_code(by_source, ["openai/gsm8k"])
    assert runs_code(RewardConfig(function="code_asserts"), [])
    assert not runs_code(RewardConfig(), ["apps"])
