"""User-supplied reward functions: loading and rejected functions."""

from __future__ import annotations

import pytest

from mcore_rl.config.reward import OverlongConfig, RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.functions import Sample
from mcore_rl.rewards.graders.loading import load_grader
from mcore_rl.rewards.manager import soft_overlong
from mcore_rl.rewards.processes.limited_grader import EventLoop
from mcore_rl.types import Score

SAMPLE = Sample("gsm8k", "the answer is 72", "72", {"index": 3})


def graded(config, sample=SAMPLE):
    (score,) = load_grader(config, SandboxConfig()).grade([sample])
    return score


def written(tmp_path, body, name="mine.py"):
    path = tmp_path / name
    path.write_text(body)
    return path


def test_a_function_gets_what_verl_would_give_it(tmp_path):
    path = written(
        tmp_path,
        "def f(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    assert (data_source, ground_truth, extra_info) == ('gsm8k', '72', {'index': 3})\n"
        "    assert kwargs == {'bonus': '0.5'}\n"
        "    return {'score': float(kwargs['bonus']), 'acc': ground_truth in solution_str}\n",
    )
    score = graded(RewardConfig(function=f"{path}:f", kwargs={"bonus": "0.5"}))
    assert (score.reward, score.accuracy, score.error) == (0.5, 1.0, None)


def test_a_module_on_the_path_is_found_by_name(tmp_path, monkeypatch):
    written(tmp_path, "def f(data_source, solution_str, ground_truth, extra_info=None): return len(solution_str)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert graded(RewardConfig(function="mine:f")).reward == 16.0


@pytest.mark.parametrize(
    ("body", "function", "message"),
    [
        (None, "mine.py:f", "there is no file"),
        ("", "mine.py:f", "has no function f"),
        ("f = 3", "mine.py:f", "must be a plain function, not int"),
        ("import does_not_exist_at_all", "mine.py:f", "does not import: ModuleNotFoundError: No module named"),
        ("def f(:", "mine.py:f", "does not import: SyntaxError"),
        ("raise SystemExit(3)", "mine.py:f", "does not import: SystemExit: 3"),
        ("def f(a, b): return 1", "mine.py:f", "cannot be called as f"),
        ("def f(data_source, solution_str, ground_truth, extra_info): return 1", "mine.py:f", None),
        ("", "mine.py", "must be math or module_or_file.py:function"),
        ("", ":f", "must be math or"),
        ("", "mine.py:", "must be math or"),
        ("", "maths", "must be math or"),
        ("", "no_such_module_here:f", "does not import: ModuleNotFoundError"),
        ("", "../relative/mine:f", "must end in .py"),
    ],
)
def test_what_cannot_be_loaded_is_a_config_error_on_one_line(tmp_path, monkeypatch, body, function, message):
    monkeypatch.chdir(tmp_path)
    if body is not None:
        written(tmp_path, body)
    if message is None:
        load_grader(RewardConfig(function=function), SandboxConfig())
        return
    with pytest.raises(ConfigError) as caught:
        load_grader(RewardConfig(function=function), SandboxConfig())
    assert f"reward.function={function}" in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_keywords_that_a_function_does_not_take_are_refused(tmp_path):
    path = written(tmp_path, "def f(data_source, solution_str, ground_truth, extra_info=None): return 1\n")
    with pytest.raises(ConfigError, match=r"reward\.kwargs\): got an unexpected keyword argument 'bonus'"):
        load_grader(RewardConfig(function=f"{path}:f", kwargs={"bonus": "1"}), SandboxConfig())


def test_an_async_function_keeps_what_belongs_to_its_loop(tmp_path):
    path = written(
        tmp_path,
        "import asyncio\nlock = asyncio.Lock()\nhome = []\n"
        "async def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    async with lock:\n"
        "        await asyncio.sleep(0)\n"
        "    home.append(asyncio.get_running_loop())\n"
        "    return {'score': float(home[0] is home[-1]), 'calls': len(home)}\n",
    )
    grader, loop = load_grader(RewardConfig(function=f"{path}:f"), SandboxConfig()), EventLoop()
    scores = [loop.run(grader.grade([SAMPLE]))[0] for _ in range(2)]
    assert grader.is_async
    assert [(score.reward, score.parts["calls"]) for score in scores] == [(1, 1), (1, 2)]


def test_the_builtin_gives_the_configured_rewards_and_plain_accuracy():
    config = RewardConfig(correct=1.0, incorrect=-1.0)
    assert (graded(config).reward, graded(config).accuracy) == (1.0, 1.0)
    wrong = graded(config, Sample("gsm8k", "it is 71", "72", {}))
    assert (wrong.reward, wrong.accuracy) == (-1.0, 0.0)


def test_without_a_rule_nothing_is_said_of_a_response():
    assert graded(RewardConfig(function="none")) == Score(0.0, 0.0)


def test_overlong_punishment_has_dapos_three_pieces():
    # the paper's sizes: L_max 20,480, L_cache 4,096
    paper = OverlongConfig(buffer_tokens=4096, penalty=1.0)
    punished = [soft_overlong(tokens, 20480, paper) for tokens in (0, 16384, 18432, 20480, 30000)]
    assert punished == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert soft_overlong(16385, 20480, paper) == pytest.approx(-1 / 4096)
    half = OverlongConfig(buffer_tokens=10, penalty=0.5)
    assert [soft_overlong(tokens, 10, half) for tokens in (0, 5, 10)] == [0.0, -0.25, -0.5]
