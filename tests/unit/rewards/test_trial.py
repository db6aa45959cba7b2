"""Trial of a reward function before a run: accepted and rejected functions, and their messages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mcore_rl.config.reward import RewardConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.processes.trial import rows_to_try, try_reward_function
from mcore_rl.types import Prompt

FUNCTIONS = """
import time

def needs_text(solution_str, ground_truth, **_):
    assert ground_truth == {"answer": 72}
    return solution_str[0] == "7"

def right(solution_str, ground_truth, **_):
    assert ground_truth == {"answer": 72}
    return solution_str == '{"answer": 72}'

def broken(solution_str, **_):
    return parse(solution_str)

def parse(text):
    raise LookupError("no " + repr(text))

def slow(**_):
    time.sleep(1000)

def nothing(**_):
    return None

def strict(solution_str, **_):
    return 0.0 if not solution_str else 1 / 0

def by_turns(solution_str, extra_info, **_):
    return 1.0 / extra_info["num_turns"] + sum(extra_info["tool_rewards"]) + extra_info["level"]

def by_tools(extra_info, **_):
    return float(sum(extra_info["episode_rewards_of_tools"].values()))
"""
PROMPT = Prompt(0, np.zeros(1, np.int32), "6*12=", "sums", {"answer": 72})


@pytest.fixture
def tried(functions: Path):
    return lambda name: try_reward_function(RewardConfig(function=f"{functions}:{name}", timeout_seconds=0.5), PROMPT)


def test_trial_passes_a_function_that_grades_the_ground_truth(tried):
    assert tried("right") is None
    assert tried("needs_text") is None  # the trial then skips the empty response
    assert try_reward_function(RewardConfig(), PROMPT) is None


def test_trial_rejects_a_function_that_fails_on_any_response(tried):
    with pytest.raises(ConfigError) as caught:
        tried("broken")
    message, *shown = str(caught.value).splitlines()
    assert "mine.py:broken cannot grade the first prompt of data.train" in message
    assert """no '{"answer": 72}'; with an empty response, the grader raised LookupError: no ''""" in message
    line = FUNCTIONS.splitlines().index('    raise LookupError("no " + repr(text))') + 1
    assert any(text.endswith(f'mine.py", line {line}, in parse') for text in shown)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("slow", r"did not finish within reward\.timeout_seconds=0\.5(.|\n)*mine\.py\", line 19, in slow"),
        ("nothing", "returned None instead of a finite number"),
    ],
)
def test_trial_rejects_a_function_without_a_result(tried, name, cause):
    with pytest.raises(ConfigError, match=rf"mine\.py:{name} cannot grade .*{cause}"):
        tried(name)


def test_trial_warns_if_only_the_ground_truth_fails(tried):
    warning = tried("strict")
    assert warning.startswith("warning: reward.function=")
    assert "ZeroDivisionError: division by zero; with an empty response it works" in warning
    assert "in strict" in warning


def test_trial_covers_every_user_function_that_rows_choose(functions):
    mine = {name: f"{functions}:{name}" for name in ("right", "broken")}
    config = RewardConfig(function="by_data_source", functions={"sums": mine["right"], "other*": mine["broken"]})
    sources = ["openai/gsm8k", "sums", "sums", "other/a", "other/b", "sums"]
    assert rows_to_try(config, sources) == [1, 3]
    assert rows_to_try(config, ["openai/gsm8k"]) == []
    assert rows_to_try(RewardConfig(), sources) == [0]
    assert try_reward_function(config, PROMPT) is None
    other = Prompt(3, PROMPT.token_ids, "q", "other/a", "1")
    with pytest.raises(
        ConfigError, match=r"by_data_source cannot grade the first prompt of data\.train with data_source"
    ):
        try_reward_function(config, other)


def test_trial_passes_the_extra_info_of_a_run(functions):
    by_turns, by_tools = (RewardConfig(function=f"{functions}:{name}") for name in ("by_turns", "by_tools"))
    prompt = Prompt(0, np.zeros(1, np.int32), "q", "sums", "5", {"level": 3})
    for config, multi_turn in ((by_turns, False), (by_turns, True), (by_tools, True)):
        assert try_reward_function(config, prompt, multi_turn=multi_turn) is None
    with pytest.raises(ConfigError, match="KeyError: 'episode_rewards_of_tools'"):
        try_reward_function(by_tools, prompt)
