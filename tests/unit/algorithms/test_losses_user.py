"""User-defined policy losses by module_or_file.py:function."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mcore_rl.algorithms import compute_policy_loss, policy_loss, policy_loss_options
from mcore_rl.config.algorithm import PolicyLossConfig
from mcore_rl.errors import ConfigError
from mcore_rl.types import Mean

SOURCE = """
import torch
from mcore_rl.algorithms import Needs

def squared(logp, old_logp, advantages, mask, rollout_logp=None, *, clip_low=1.0):
    difference = logp - old_logp
    return clip_low * difference.square() - advantages * logp + 1, {"gap": difference.sum() / mask.sum(), "two": 2}

def spread(logp, old_logp, advantages, mask, rollout_logp):
    assert old_logp is None
    assert logp.shape == rollout_logp.shape
    return (logp - rollout_logp).sum(-1, keepdim=True) * mask

spread.needs = Needs(rollout_logp=True, whole_sequence=True)

def reference(logp, old_logp, advantages, mask, rollout_logp):
    return logp

reference.needs = Needs(reference=True)

def wrong_needs(logp, old_logp, advantages, mask, rollout_logp):
    return logp

wrong_needs.needs = ("advantages",)

def scalar(logp, **_):
    return logp.sum()

def bad_metrics(logp, **_):
    return logp, [1.0]

def few(logp, advantages):
    return logp

async def later(logp, **_):
    return logp

number = 3
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "own_loss.py"
    path.write_text(SOURCE)
    return lambda name: f"{path}:{name}"


def make():
    g = torch.Generator().manual_seed(0)
    logp, old, advantages = torch.randn(3, 2, 5, generator=g)
    return {
        "logp": logp,
        "old_logp": old,
        "advantages": advantages,
        "mask": torch.tensor([[1.0] * 5, [1.0, 1, 0, 0, 0]]),
    }


def test_user_loss_computes_function(spec):
    given = make()
    outside = given["mask"] == 0
    given["old_logp"] = given["old_logp"].masked_fill(outside, torch.nan)
    logp = given["logp"].masked_fill(outside, torch.inf).requires_grad_()
    result = compute_policy_loss(spec("squared"), **{**given, "logp": logp}, clip_low=0.5)
    result.loss.sum().backward()
    difference = (given["logp"] - given["old_logp"])[~outside]
    torch.testing.assert_close(
        result.loss[~outside], 0.5 * difference.square() - (given["advantages"] * given["logp"])[~outside] + 1
    )
    torch.testing.assert_close(logp.grad[~outside], difference - given["advantages"][~outside])
    assert not result.loss[outside].any()
    assert not logp.grad[outside].any()
    assert result.metrics == {"gap": Mean(pytest.approx(difference.sum().item()), 7.0), "two": Mean(14.0, 7.0)}


def test_user_loss_needs_are_declared_or_policy_gradient_defaults(spec):
    needs = policy_loss(spec("squared")).needs
    assert needs.advantages
    assert needs.old_logp
    assert not needs.whole_sequence
    assert policy_loss(spec("spread"), clip_low=None).needs.whole_sequence
    given = make()
    with pytest.raises(ValueError, match="needs rollout_logp"):
        compute_policy_loss(spec("spread"), logp=given["logp"], mask=given["mask"])
    loss = compute_policy_loss(spec("spread"), logp=given["logp"], mask=given["mask"], rollout_logp=given["old_logp"])
    assert loss.loss.shape == (2, 5)


def test_user_loss_takes_kwargs_and_built_in_loss_rejects_them(tmp_path):
    (tmp_path / "own.py").write_text(
        "def margin(logp, old_logp, advantages, mask, rollout_logp, *, margin, clip_low=0.0, power=1):\n"
        "    return (margin - clip_low - logp) ** power\n"
    )
    section = PolicyLossConfig(name=f"{tmp_path / 'own.py'}:margin", clip_low=0.5, kwargs={"margin": 2, "power": None})
    given = {**make(), "mask": torch.ones(2, 5)}
    result = compute_policy_loss(section.name, **given, **policy_loss_options(section))
    torch.testing.assert_close(result.loss, 1.5 - given["logp"])
    for changes, message in (
        ({"kwargs": {"margins": 1}}, r"own\.py:margin cannot be called as f\(logp=.*margin"),
        ({"kwargs": {"margin": 1, "logp": 1}}, r"own\.py:margin cannot be called as f\(logp=.*logp"),
        ({"kwargs": {"margin": 1, "name": 1}}, r"own\.py:margin cannot be called as f\(logp=.*'name'"),
        ({"kwargs": {"margin": 1, "clip_low": 1}}, r"\.kwargs: algorithm\.policy_loss\.clip_low has its own key"),
        ({"name": "cispo"}, r"policy_loss\.kwargs=.*'margin': 2.*algorithm\.policy_loss\.name=cispo is built in"),
    ):
        refused = replace(section, **changes)
        with pytest.raises(ConfigError, match=message):
            policy_loss(refused.name, **policy_loss_options(refused))


def test_user_loss_may_be_in_a_module():
    given = make()
    with pytest.raises(ConfigError, match=r"policy_loss\.name=statistics:mean cannot be called as f\(logp="):
        policy_loss("statistics:mean")
    with pytest.raises(ConfigError, match="returned dict; the loss must be a tensor shaped as logp"):
        compute_policy_loss("builtins:dict", **given)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("absent", {}, r"algorithm\.policy_loss\.name=.*own_loss\.py has no function absent"),
        ("number", {}, r"number must be a plain function, not int"),
        ("later", {}, r"later must be a plain function, not an async one; write def"),
        ("few", {}, r"cannot be called as f\(logp=, old_logp=, advantages=, mask=, rollout_logp=, \*\*options\)"),
        ("squared", {"kl_coef": 1.0}, r"kl_coef"),
        ("reference", {}, r"needs reference, which is not available to user-defined"),
        ("wrong_needs", {}, r"its attribute needs must be a mcore_rl.algorithms.Needs"),
    ],
)
def test_user_loss_with_unsuitable_function_raises(spec, name, options, message):
    with pytest.raises(ConfigError, match=message):
        policy_loss(spec(name), **options)


def test_user_loss_with_missing_or_broken_file_names_cause(tmp_path):
    with pytest.raises(ConfigError, match=r"policy_loss\.name=.*there is no file"):
        policy_loss(f"{tmp_path}/nothing.py:f")
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_that_name\n")
    with pytest.raises(ConfigError, match=r"does not import: ModuleNotFoundError: No module named 'nothing_of"):
        policy_loss(f"{broken}:f")
    with pytest.raises(ConfigError, match=r"must be a loss's name or module_or_file\.py:function"):
        policy_loss("file.py:")
    with pytest.raises(ConfigError, match=r"name must end in \.py"):
        policy_loss("my/file:f")


def test_user_loss_with_invalid_result_raises(spec):
    given = make()
    with pytest.raises(ConfigError, match=r"returned \[\]; the loss must be a tensor shaped as logp, \[2, 5\]"):
        compute_policy_loss(spec("scalar"), **given)
    with pytest.raises(ConfigError, match="returned metrics as list; they must be a dict of floats"):
        compute_policy_loss(spec("bad_metrics"), **given)
