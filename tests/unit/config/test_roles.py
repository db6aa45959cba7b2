"""Roles: checks of the critic, and errors of shared code name the role's own keys."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.models import CriticConfig, RewardModelConfig
from mcore_rl.config.roles import POLICY, ModelRole
from mcore_rl.config.rules.validation import validate, validate_critic
from mcore_rl.config.schema import ModelConfig
from mcore_rl.errors import ConfigError

ROOT = Path(__file__).parents[3]
SHARED = (
    "mcore_rl/resolved/layout.py",
    "mcore_rl/resolved/implementation.py",
    "mcore_rl/resolved/recompute.py",
    "mcore_rl/resolved/model.py",
    "mcore_rl/resolved/attention.py",
    "mcore_rl/megatron/model",
    "mcore_rl/megatron/roles/rank_model.py",
    "mcore_rl/weights/engine_config.py",
)
"""Code that is shared by several roles."""
OF_A_POLICY = re.compile(r"\b(actor|rollout)\.[a-z]|\bmodel\.(hf_path|tokenizer_path|dtype)\b")


def test_critic_config_actor_keys_with_own_defaults(base: str) -> None:
    config = load_config(base, ["critic.parallel.tp=2", "critic.optimizer.warmup_steps=3", "actor.optimizer.lr=2e-6"])
    validate_critic(config)
    assert (config.critic.parallel.tp, config.actor.parallel.tp) == (2, 1)
    assert (config.critic.optimizer.lr, config.critic.optimizer.warmup_steps) == (1e-5, 3)
    assert config.actor.optimizer.warmup_steps == 0


def test_num_critic_ranks_defaults_to_the_policy(base: str) -> None:
    slots = ["cluster.gpus_per_node=3", "actor.num_ranks=2", "critic.parallel.ep=2"]
    validate_critic(load_config(base, slots))
    with pytest.raises(ConfigError, match=r"critic\.parallel\.ep=2 .* does not divide the 3 ranks of the critic"):
        validate_critic(load_config(base, [*slots, "critic.num_ranks=3"]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["critic.parallel.tp=3"], r"critic\.parallel\.tp=3.*divide the 4 ranks of the critic \(critic\.num_ranks\)"),
        (["critic.num_ranks=4", "actor.num_ranks=2"], r"^critic\.num_ranks=4 ranks share the slots of the 2 trainer"),
        (["critic.recompute=some"], r"^critic\.recompute=some must be one of"),
        (["critic.tokens_per_microbatch=10"], r"^critic\.tokens_per_microbatch=10 must be at least"),
        (["critic.overlap_param_gather=true"], r"^critic\.overlap_param_gather=true needs critic\."),
        (["critic.hf_path=/nowhere"], r"^critic\.hf_path=/nowhere: no config\.json there"),
        (["critic.mtp_loss_coefficient=0.1"], r"^critic\.mtp_loss_coefficient=0\.1 has no effect"),
        (["critic.moe.router_replay=policy"], r"^critic\.moe\.router_replay=policy has no effect"),
        (["critic.clip_rnge=1"], r"unknown key critic\.clip_rnge; did you mean critic\.clip_range\?"),
    ],
)
def test_validate_critic_errors_name_its_keys(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):  # noqa: PT012 - as a run does it
        validate(config := load_config(base, overrides))
        validate_critic(config)


def test_critic_clip_range_may_be_null(base: str) -> None:
    config = load_config(base, ["critic.clip_range=null"])
    validate_critic(config)
    assert config.critic.clip_range is None


def test_policy_keys_have_the_prefix_actor() -> None:
    assert (POLICY.key("parallel.tp"), POLICY.checkpoint) == ("actor.parallel.tp", "model.hf_path")


def test_value_roles_name_the_key_of_their_checkpoint() -> None:
    policy = ModelConfig(hf_path="/policy", dtype="bfloat16")
    for path, key, used in ((None, "model.hf_path", "/policy"), ("/own", "{}.hf_path", "/own")):
        critic = ModelRole.critic(CriticConfig(hf_path=path), policy)
        reward_model = ModelRole.reward_model(RewardModelConfig(hf_path=path), policy)
        for role, prefix in ((critic, "critic"), (reward_model, "reward_model")):
            found = (role.key("lr"), role.checkpoint, role.model.hf_path, role.model.dtype)
            assert found == (f"{prefix}.lr", key.format(prefix), used, "bfloat16")
    assert policy.hf_path == "/policy"


@pytest.mark.parametrize("part", SHARED)
def test_shared_code_contains_no_key_of_the_policy(part: str) -> None:
    """A literal key would be the policy's in an error about a critic or a judge."""
    path = ROOT / part
    for file in [path] if path.is_file() else path.rglob("*.py"):
        wrong = [f"{file.name}:{text.lineno}: {text.value}" for text in _texts(ast.parse(file.read_text()))]
        assert not wrong


def _texts(tree: ast.Module) -> list[ast.Constant]:
    """Strings that contain a key of the policy, except docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [node for node in constants if isinstance(node.value, str) and OF_A_POLICY.search(node.value)]
