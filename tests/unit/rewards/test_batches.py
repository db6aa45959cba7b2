"""Batch reward functions: their arguments, the time of the call, and the effect of errors."""

from __future__ import annotations

import pytest

from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.functions import Sample
from mcore_rl.rewards.graders.loading import load_grader
from mcore_rl.rewards.manager import Batches
from mcore_rl.rewards.processes.trial import try_reward_function
from tests.unit.rewards.managers import grade_with, graded, prompt, running_manager

FUNCTIONS = """
import asyncio, statistics, time
import numpy as np

def ranks(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert set(data_sources) == {"test"} and len(extra_infos) == len(ground_truths) == len(solution_strs)
    if "none" in solution_strs:
        return None
    if "short" in solution_strs:
        return [0.0] * (len(solution_strs) - 1)
    if "text" in solution_strs:
        return "x" * len(solution_strs)
    if "raise" in solution_strs:
        raise LookupError("a key")
    if "hang" in solution_strs:
        time.sleep(1000)
    order = sorted(solution_strs, key=int)
    results = [{"score": order.index(text), "seen": "".join(solution_strs)} for text in solution_strs]
    if "7" in solution_strs:
        results[solution_strs.index("7")] = float("nan")
    return results

def spread(data_sources, solution_strs, ground_truths, extra_infos):
    return [statistics.stdev(map(len, solution_strs))] * len(solution_strs)

async def array(data_sources, solution_strs, ground_truths, extra_infos, bonus):
    await asyncio.sleep(0)
    return np.array([float(text) + float(bonus) for text in solution_strs])
"""


@pytest.fixture(scope="module")
def config(functions):
    return lambda name="ranks", **more: RewardConfig(
        **{"function": f"{functions}:{name}", "manager": "batch", "timeout_seconds": 5.0, **more}
    )


@pytest.fixture(scope="module")
def manager(config):
    with running_manager(config()) as manager:
        yield manager


def test_group_is_graded_in_its_own_order_for_any_submit_order(config):
    with running_manager(config(workers=2)) as manager:
        groups = {group: range(3 * group, 3 * group + 3) for group in range(40)}
        texts = {key: str(100 + (key * 7) % 120) for keys in groups.values() for key in keys}
        for key in sorted(texts, key=lambda key: (key % 3, -key)):
            manager.submit(key, prompt(), texts[key], 1, group=groups[key // 3], task=range(120))
        scores = manager.collect(texts)
    for keys in groups.values():
        order = sorted(texts[key] for key in keys)
        assert [scores[key].reward for key in keys] == [order.index(texts[key]) for key in keys]
        assert {scores[key].parts["seen"] for key in keys} == {"".join(texts[key] for key in keys)}


def test_batch_can_be_a_whole_task(config):
    with running_manager(config(batch="task")) as manager:
        for key in (3, 0, 2, 1):
            manager.submit(key, prompt(), str(19 - key), 1, group=[key & 2, (key & 2) + 1], task=range(4))
        scores = manager.collect(range(4))
    assert [scores[key].reward for key in range(4)] == [3, 2, 1, 0]


def test_response_without_group_is_a_batch_of_one(manager):
    manager.submit(0, prompt(), "5", 1)
    assert manager.collect([0])[0].parts["seen"] == "5"


def test_error_fails_its_group_only(config):
    bad = {
        "none": "returned None instead of a list of 2 results",
        "short": "returned 1 results for 2 responses",
        "text": "returned str 'xx' instead of a list of 2 results",
        "raise": "LookupError: a key",
        "hang": "did not finish within reward.timeout_seconds=1",
    }
    texts = [text for word in bad for text in (word, "1", "2", "3")]
    scores = iter(graded(config(timeout_seconds=1.0), texts, group_size=2))
    for message in bad.values():
        for score in (next(scores), next(scores)):
            assert message in score.error
            assert score.reward == 0.0
        assert [(score.reward, score.error) for score in (next(scores), next(scores))] == [(0, None), (1, None)]


def test_result_without_a_number_fails_its_response_only(manager):
    scores = grade_with(manager, ["6", "7", "8"], group_size=3)
    assert [scores[key].reward for key in (0, 2)] == [0.0, 2.0]
    assert "nan instead of a finite number" in scores[1].error


def test_async_batch_function_receives_its_arguments(config):
    scores = graded(config("array", kwargs={"bonus": "0.5"}), [*map(str, range(40))], group_size=4)
    assert [score.reward for score in scores] == [key + 0.5 for key in range(40)]


def test_withdrawn_response_ends_the_wait_of_its_group(manager):
    manager.submit(0, prompt(), "5", 1, group=range(3))
    manager.withdraw(1, group=range(3))
    manager.submit(2, prompt(), "4", 1, group=range(3))
    scores = manager.collect([0, 2])
    assert [scores[key].parts["seen"] for key in (0, 2)] == ["54", "54"]
    manager.withdraw(3, group=(3,))
    manager.withdraw(4, group=(4, 5))
    manager.submit(5, prompt(), "1", 1, group=(4, 5))
    assert manager.collect([5])[5].parts["seen"] == "1"


def test_key_outside_its_batch_raises_and_batches_are_forgotten():
    batches, sample = Batches(), Sample("test", "x", "y", {})
    with pytest.raises(ValueError, match="key 5 is not in its batch"):
        batches.add(5, sample, range(3))
    for _ in range(2):  # keys can be reused after a batch
        assert batches.add(1, sample, range(2)) == {}
        assert list(batches.add(0, sample, range(2))) == [0, 1]


def test_function_of_single_responses_rejects_manager_batch(tmp_path):
    (tmp_path / "mine.py").write_text("def f(data_source, solution_str, ground_truth, extra_info): return 1\n")
    with pytest.raises(
        ConfigError, match=r"cannot be called as f\(data_sources, solution_strs, ground_truths, extra_infos"
    ):
        load_grader(RewardConfig(function=f"{tmp_path}/mine.py:f", manager="batch"), SandboxConfig())


def test_batch_function_is_tried_before_a_run(config):
    assert try_reward_function(config(), prompt("5")) is None
    assert try_reward_function(config("spread"), prompt("5")) is None  # the spread of one response is undefined
    with pytest.raises(ConfigError, match="cannot grade the first prompt"):
        try_reward_function(config("array", kwargs={"bonus": "much"}), prompt("5"))
