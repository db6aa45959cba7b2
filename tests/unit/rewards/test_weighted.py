"""Weighted sums of reward functions: sum, named parts, and rejected configurations."""

from __future__ import annotations

import pytest

from mcore_rl.config.reward import RewardConfig, WeightedFunctionConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.graders.loading import load_grader
from tests.unit.rewards.managers import graded, graded_here

FUNCTIONS = """
import asyncio

def brevity(data_source, solution_str, ground_truth, extra_info=None, limit="10"):
    return {"score": -len(solution_str) / float(limit), "acc": 0.25, "chars": len(solution_str)}

async def polite(solution_str, **_):
    await asyncio.sleep(0)
    if solution_str == "raise":
        raise LookupError("no manners")
    return "please" in solution_str

def broken(**_):
    return "x"

def nothing(**_):
    return None

def only_long(solution_str, **_):
    return {"score": None} if len(solution_str) < 5 else 2.0
"""


@pytest.fixture
def entry(functions):
    return lambda name, **more: WeightedFunctionConfig(f"{functions}:{name}", **more)


def test_the_weighted_sum_and_its_parts_by_name(entry):
    functions = [WeightedFunctionConfig("math", 2.0, "right"), entry("brevity", weight=0.5, kwargs={"limit": "20"})]
    score = graded_here(RewardConfig(weighted=functions), "It is 5.")
    assert score.reward == pytest.approx(2.0 * 1.0 + 0.5 * -8 / 20)
    assert score.accuracy == 1.0
    assert score.parts == {"right": 1.0, "brevity": -0.4, "brevity_chars": 8.0}


def test_accuracy_is_that_of_the_first_or_of_the_one_that_is_named(entry):
    functions = [entry("brevity"), WeightedFunctionConfig("by_data_source", 0.0, "rule")]
    assert graded_here(RewardConfig(weighted=functions), "Answer: 5").accuracy == 0.25
    named = graded_here(RewardConfig(weighted=functions, accuracy_of="rule"), "Answer: 5")
    assert (named.accuracy, named.parts["rule"], named.parts["rule_pred"]) == (1.0, 1.0, "5")
    assert named.reward == pytest.approx(-0.9)


def test_async_and_plain_ones_go_together_in_a_grading_process(entry):
    config = RewardConfig(
        weighted=[WeightedFunctionConfig("math"), entry("polite", weight=0.1)], max_concurrent_calls=4
    )
    texts = ["5", "please take 5", "please", "raise"] * 5
    for text, score in zip(texts, graded(config, texts, "5"), strict=True):
        if text == "raise":
            assert "LookupError: no manners" in score.error
        else:
            assert score.reward == pytest.approx(float("5" in text) + 0.1 * ("please" in text))
            assert score.parts["polite"] == float("please" in text)


def test_an_error_of_one_is_an_error_of_all_and_says_whose(entry):
    score = graded_here(RewardConfig(weighted=[WeightedFunctionConfig("math"), entry("broken")]), "5")
    assert score.error == "broken: the reward function returned str 'x' instead of a finite number or a dict"
    assert score.reward == 0.0


def test_a_function_that_returns_none_is_left_out_of_the_sum(entry):
    functions = [entry("only_long", weight=0.5), WeightedFunctionConfig("math", 2.0, "right")]
    short, long = (graded_here(RewardConfig(weighted=functions), text) for text in ("5", "It is 5."))
    assert (short.error, short.reward, short.accuracy, short.parts) == (None, 2.0, 1.0, {"right": 1.0})
    assert (long.reward, long.accuracy, long.parts) == (3.0, 2.0, {"only_long": 2.0, "right": 1.0})


def test_accuracy_is_the_first_applicable_if_the_named_one_is_not(entry):
    functions = [WeightedFunctionConfig("math", name="right"), entry("nothing")]
    assert graded_here(RewardConfig(weighted=functions, accuracy_of="nothing"), "5").accuracy == 1.0


def test_none_from_every_function_is_an_error(entry):
    score = graded_here(RewardConfig(weighted=[entry("nothing"), entry("only_long")]), "5")
    assert score.error == "no function of reward.weighted applies to the response: each of them returned None"


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (("a", "a"), {}, r"^reward\.weighted\[1\]\.name=a is already in use; set reward\.weighted\[1\]\.name"),
        (("a", "mean"), {}, r"^reward\.weighted\[1\]\.name=mean is reserved for records"),
        ((None, None), {}, r"^reward\.weighted\[1\]\.name=math is already in use"),
        (("a", "b"), {"accuracy_of": "c"}, r"^reward\.accuracy_of=c must be one of a, b"),
    ],
)
def test_names_that_mean_two_things_are_refused(names, more, message):
    functions = [WeightedFunctionConfig("math", name=name) for name in names]
    with pytest.raises(ConfigError, match=message):
        load_grader(RewardConfig(weighted=functions, **more), SandboxConfig())


def test_a_function_that_does_not_load_is_named_by_its_place():
    functions = [WeightedFunctionConfig("math"), WeightedFunctionConfig("gone.py:f")]
    with pytest.raises(ConfigError, match=r"^reward\.weighted\[1\]\.function=gone\.py:f: there is no file"):
        load_grader(RewardConfig(weighted=functions), SandboxConfig())
