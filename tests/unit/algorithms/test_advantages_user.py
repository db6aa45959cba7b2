"""A user's own estimator: what it is given, what it may return, and what its mistakes say."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.algorithms import advantage_needs, compute_advantages, estimator
from mcore_rl.errors import ConfigError

SOURCE = """
from mcore_rl.algorithms import Needs

def centred(token_rewards, mask, group_ids, values, baseline_rewards, scale=1.0):
    assert values is None and baseline_rewards is None
    return scale * (token_rewards.sum(-1, keepdim=True) - token_rewards.sum(-1).mean()).expand(mask.shape)

def over_values(token_rewards, mask, values, **rest):
    return token_rewards - values, token_rewards

over_values.needs = Needs(values=True)

def short(token_rewards, **rest):
    return token_rewards[:, 0]

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


def test_it_is_called_with_the_contracts_tensors_and_its_options(mine):
    result = compute_advantages(mine("centred"), **INPUTS, scale=2.0)
    assert result.advantages.tolist() == [[-2, -2], [2, 0]]  # 0 where the mask is, whatever was returned
    assert result.returns.tolist() == result.advantages.tolist()
    assert compute_advantages(mine("centred"), **INPUTS, scale=None).advantages[0, 0] == -1
    assert advantage_needs(mine("centred")).group_ids


def test_it_may_say_what_it_needs_and_return_returns(mine):
    assert advantage_needs(mine("over_values")).critic
    with pytest.raises(ValueError, match="needs values"):
        compute_advantages(mine("over_values"), **INPUTS)
    result = compute_advantages(mine("over_values"), **INPUTS, values=torch.ones(2, 2))
    assert result.advantages.tolist() == [[-1, 0], [-1, 0]]
    assert result.returns.tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("short", r"returned torch.float32 \[2\].*\[2, 2\]"),
        ("whole", r"returned torch.int64 \[2, 2\]; it must be floating point"),
        ("none", r"returned NoneType instead of a tensor \[2, 2\]"),
        ("three", "returned 3 values instead of"),
        ("unlike", r"cannot be called as f\(token_rewards=, mask=, group_ids=, values=, baseline_rewards="),
        ("wishful", "attribute needs must be a mcore_rl.algorithms.Needs, not 'values'"),
        ("absent", "has no function absent"),
    ],
)
def test_mistakes_name_key_function_and_cause(mine, function, message):
    with pytest.raises(ConfigError, match=rf"algorithm\.advantage=.*mine\.py:{function}.*{message}"):
        compute_advantages(mine(function), **INPUTS)


def test_an_option_that_it_does_not_take_is_refused(mine):
    with pytest.raises(ConfigError, match="unexpected keyword argument 'gamma'"):
        estimator(mine("centred"), gamma=0.5)
    with pytest.raises(ConfigError, match=r"algorithm\.advantage=:f must be an estimator's name or module_or_file"):
        estimator(":f")
