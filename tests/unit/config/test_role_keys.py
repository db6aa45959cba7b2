"""Errors of code shared by several roles name the role's own keys."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from mcore_rl.config.models import CriticConfig, RewardModelConfig
from mcore_rl.config.roles import POLICY, ModelRole
from mcore_rl.config.schema import ModelConfig

ROOT = Path(__file__).parents[3]
SHARED = (
    "mcore_rl/resolved/layout.py",
    "mcore_rl/resolved/implementation.py",
    "mcore_rl/resolved/recompute.py",
    "mcore_rl/resolved/model.py",
    "mcore_rl/resolved/attention.py",
    "mcore_rl/megatron/model",
    "mcore_rl/megatron/roles/rank_model.py",
    "mcore_rl/megatron/roles/trained_model.py",
    "mcore_rl/weights/engine_config.py",
)
"""Code that more than one role runs."""
OF_A_POLICY = re.compile(r"\b(actor|rollout)\.[a-z]|\bmodel\.(hf_path|tokenizer_path)\b")


def test_policy_keys_have_the_prefix_actor() -> None:
    assert (POLICY.key("parallel.tp"), POLICY.checkpoint) == ("actor.parallel.tp", "model.hf_path")


def test_value_roles_name_the_key_of_their_checkpoint() -> None:
    policy = ModelConfig(hf_path="/policy")
    for path, key, used in ((None, "model.hf_path", "/policy"), ("/own", "{}.hf_path", "/own")):
        critic = ModelRole.critic(CriticConfig(hf_path=path), policy)
        reward_model = ModelRole.reward_model(RewardModelConfig(hf_path=path), policy)
        for role, prefix in ((critic, "critic"), (reward_model, "reward_model")):
            found = (role.key("lr"), role.checkpoint, role.model.hf_path)
            assert found == (f"{prefix}.lr", key.format(prefix), used)


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
