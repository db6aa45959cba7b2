"""User-defined estimators: their arguments, allowed results, and error messages."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mcore_rl.algorithms import compute_advantages, estimator, policy_loss
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.schema import Config, TrainerConfig
from mcore_rl.errors import ConfigError
from mcore_rl.trainer.batches import batch_builder
from mcore_rl.types import RolloutScalars

SOURCE = """
from mcore_rl.algorithms import Needs

def centred(token_rewards, mask, group_ids, values, baseline_rewards, scale=1.0):
    assert values is None and baseline_rewards is None
    return scale * (token_rewards.sum(-1, keepdim=True) - token_rewards.sum(-1).mean()).expand(mask.shape)

def over_values(token_rewards, mask, values, **rest):
    return token_rewards - values, token_rewards

over_values.needs = Needs(values=True)

def one_each(token_rewards, mask, group_ids, lengths, **rest):
    assert token_rewards.shape == mask.shape == (len(group_ids), 1) and mask.all()
    return token_rewards[:, 0] / lengths, token_rewards

def against_greedy(token_rewards, baseline_rewards, **rest):
    return token_rewards[:, 0] - baseline_rewards

against_greedy.needs = Needs(baseline_rewards=True)

def discounted(token_rewards, mask, group_ids, **rest):
    assert group_ids is None
    return token_rewards.flip(-1).cumsum(-1).flip(-1)

discounted.per_response = False

def by_tokens(token_rewards, **rest):
    return token_rewards[:, 0]

by_tokens.per_response = False

def short(token_rewards, **rest):
    return token_rewards[:1]

def groups_and_values(**rest):
    return None

groups_and_values.needs = Needs(values=True, group_ids=True)

def values_per_response(**rest):
    return None

values_per_response.needs, values_per_response.per_response = Needs(values=True), True

def parts(**rest):
    return None

parts.needs = Needs(parts=True, score_norms=True)

def groups_by_tokens(**rest):
    return None

groups_by_tokens.needs, groups_by_tokens.per_response = Needs(group_ids=True), False

def undecided(**rest):
    return None

undecided.per_response = "yes"

def whole(token_rewards, **rest):
    return token_rewards.long()

def none(**rest):
    return None

def three(token_rewards, **rest):
    return token_rewards, token_rewards, token_rewards

def unlike(rewards):
    return rewards

def wishful(**rest):
    return None

wishful.needs = "values"

def loss(logp, clip_low, **rest):
    return clip_low * logp
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return lambda function: f"{path}:{function}"


INPUTS = {
    "token_rewards": torch.tensor([[0.0, 1.0], [0.0, 3.0]]),
    "mask": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
    "group_ids": torch.tensor([4, 4]),
}


def test_user_estimator_receives_tensors_and_options(mine):
    result = compute_advantages(mine("centred"), **INPUTS, scale=2.0)
    assert result.advantages.tolist() == [[-2, -2], [2, 0]]  # 0 where the mask is 0, for any returned value
    assert result.returns.tolist() == result.advantages.tolist()
    assert compute_advantages(mine("centred"), **INPUTS, scale=None).advantages[0, 0] == -1
    assert estimator(mine("centred")).needs.group_ids


def test_user_estimator_may_declare_needs_and_return_returns(mine):
    assert estimator(mine("over_values")).needs.values
    with pytest.raises(ValueError, match="needs values"):
        compute_advantages(mine("over_values"), **INPUTS)
    result = compute_advantages(mine("over_values"), **INPUTS, values=torch.ones(2, 2))
    assert result.advantages.tolist() == [[-1, 0], [-1, 0]]
    assert result.returns.tolist() == [[0, 1], [0, 0]]


def test_user_estimator_is_per_response_and_may_take_lengths(mine):
    result = compute_advantages(mine("one_each"), **INPUTS)
    assert result.advantages.tolist() == [[0.5, 0.5], [3, 0]]
    assert result.returns.tolist() == [[1, 1], [3, 0]]
    found = compute_advantages(mine("one_each"), **INPUTS, lengths=torch.tensor([4, 2]))
    assert found.advantages.tolist() == [[0.25, 0.25], [1.5, 0]]
    greedy = compute_advantages(mine("against_greedy"), **INPUTS, baseline_rewards=torch.tensor([1.0, 1.0]))
    assert greedy.advantages.tolist() == [[0, 0], [2, 0]]


def test_user_estimator_attributes_select_needs_and_kind(mine):
    facts = {name: estimator(mine(name)) for name in ("centred", "against_greedy", "over_values", "discounted")}
    assert {name: one.per_response for name, one in facts.items()} == {
        "centred": True,
        "against_greedy": True,
        "over_values": False,
        "discounted": False,
    }
    assert not facts["discounted"].needs.group_ids
    rewards = {**INPUTS, "group_ids": None}
    assert compute_advantages(mine("discounted"), **rewards).advantages.tolist() == [[1, 1], [3, 0]]


def test_user_estimator_in_training_receives_whole_groups(mine):
    """The driver passes every response of the step once; no rank has complete groups."""
    algorithm = AlgorithmConfig(advantage=mine("centred"), advantage_kwargs={"scale": 2.0})
    settings = Config(algorithm=algorithm, trainer=TrainerConfig(prompts_per_step=1, prompts_per_update=1))
    ids, tokens = np.array([7, 7, 7, 7]), np.array([3, 1, 2, 2], np.int32)
    rewards = np.array([1.0, 0.0, 0.0, 1.0], np.float32)
    scalars = RolloutScalars(
        ids, ids, tokens + 2, tokens, tokens, rewards, rewards, np.zeros(4, np.uint8), np.zeros((4, 2), np.int32)
    )
    groups = SimpleNamespace(scalars=(scalars,), keep=(np.arange(4),), chunks=(None,), greedy=())
    batch = batch_builder(settings, 2)(groups, 1, 0)
    assert batch.advantages.tolist() == [1, -1, -1, 1]


def test_user_estimators_and_losses_are_pickled_by_name(mine, tmp_path):
    """Ranks receive them before they have imported the user's file."""
    sent = [*(estimator(mine(name)) for name in ("one_each", "over_values")), policy_loss(mine("loss"), clip_low=0.25)]
    code = """
import pickle, sys
*estimators, loss = pickle.load(sys.stdin.buffer)
print(*((each.name, each.needs.values, each.function.__name__) for each in estimators), sep="\\n")
print(loss.function.__name__, loss.options)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=pickle.dumps(sent), capture_output=True, cwd=tmp_path, check=False)
    assert done.stderr.decode() == ""
    assert done.stdout.decode().splitlines() == [
        *(
            str((f"algorithm.advantage={mine(name)}", name == "over_values", name))
            for name in ("one_each", "over_values")
        ),
        "loss {'clip_low': 0.25}",
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("by_tokens", r"returned torch.float32 \[2\].*\[2, 2\]"),
        ("short", r"returned torch.float32 \[1, 1\].*\[2, 1\]: it is called with one number per response; set its"),
        ("whole", r"returned torch.int64 \[2, 1\]; it must be floating point"),
        ("none", r"returned NoneType instead of a tensor \[2, 1\]"),
        ("groups_and_values", "needs per-token values and also whole groups, but the ranks with the values"),
        ("values_per_response", "needs per-token values and also one number per response"),
        ("groups_by_tokens", "needs group_ids, but has per_response=False, .* Set its attribute per_response to True"),
        ("parts", "attribute needs has parts, score_norms, which only built-in estimators receive"),
        ("undecided", "attribute per_response must be True or False, not 'yes'"),
        ("three", "returned 3 values instead of"),
        ("unlike", r"cannot be called as f\(token_rewards=, mask=, group_ids=, values=, baseline_rewards="),
        ("wishful", "attribute needs must be a mcore_rl.algorithms.Needs, not 'values'"),
        ("absent", "has no function absent"),
    ],
)
def test_user_estimator_mistakes_name_key_function_and_cause(mine, function, message):
    with pytest.raises(ConfigError, match=rf"algorithm\.advantage=.*mine\.py:{function}.*{message}"):
        compute_advantages(mine(function), **INPUTS)


def test_user_estimator_with_unknown_option_raises(mine):
    with pytest.raises(ConfigError, match="unexpected keyword argument 'gamma'"):
        estimator(mine("centred"), gamma=0.5)
    with pytest.raises(ConfigError, match=r"algorithm\.advantage=:f must be an estimator's name or module_or_file"):
        estimator(":f")
