"""What a key is called in the role whose model is looked at."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from mcore_rl.config.models import CriticConfig, RewardModelConfig
from mcore_rl.config.names import role_key, role_keys
from mcore_rl.config.rules.roles import keys_of

ROOT = Path(__file__).parents[3]
SHARED = (
    "mcore_rl/resolved/layout.py",
    "mcore_rl/resolved/implementation.py",
    "mcore_rl/resolved/recompute.py",
    "mcore_rl/resolved/model.py",
    "mcore_rl/data/tokenizer.py",
    "mcore_rl/megatron/model",
    "mcore_rl/weights/engine_config.py",
)
"""Code that more than one role runs."""
OF_A_POLICY = re.compile(r"\b(actor|rollout)\.[a-z]|\bmodel\.(hf_path|tokenizer_path)\b")


def test_a_key_is_the_policys_outside_of_any_role() -> None:
    assert role_key("actor.parallel.tp") == "actor.parallel.tp"


def test_a_role_renames_what_lies_below_a_key_and_only_that() -> None:
    with role_keys({"actor": "critic", "model.hf_path": "critic.hf_path"}):
        found = [role_key(key) for key in ("actor.parallel.tp", "actor", "actors.tp", "model.hf_path", "model.dtype")]
    assert found == ["critic.parallel.tp", "critic", "actors.tp", "critic.hf_path", "model.dtype"]
    assert role_key("actor.parallel.tp") == "actor.parallel.tp"


def test_the_longest_part_of_a_key_that_has_a_name_decides() -> None:
    with role_keys({"actor": "critic", "actor.parallel.tp": "--tp"}):
        assert (role_key("actor.parallel.tp"), role_key("actor.parallel.pp")) == ("--tp", "critic.parallel.pp")


def test_a_role_within_a_role_names_what_the_inner_one_leaves() -> None:
    with role_keys({"actor": "critic"}), role_keys({"model.hf_path": "actor.hf_path"}):
        assert role_key("model.hf_path") == "critic.hf_path"


def test_names_end_with_their_block_after_an_error() -> None:
    with pytest.raises(ValueError, match="broken"), role_keys({"actor": "critic"}):
        raise ValueError("broken")
    assert role_key("actor.lr") == "actor.lr"


@pytest.mark.parametrize("section", [CriticConfig(), RewardModelConfig()], ids=["critic", "reward_model"])
def test_a_role_on_the_policys_checkpoint_keeps_its_key(section: CriticConfig | RewardModelConfig) -> None:
    with role_keys(keys_of(section)):
        assert role_key("model.hf_path") == "model.hf_path"
    section.hf_path = "/own"
    with role_keys(keys_of(section)):
        assert role_key("model.hf_path") == f"{role_key('actor')}.hf_path" != "actor.hf_path"


@pytest.mark.parametrize("part", SHARED)
def test_code_that_roles_share_asks_for_the_names_of_keys(part: str) -> None:
    """A key that is written out would be the policy's in a critic's or a judge's message."""
    path = ROOT / part
    for file in [path] if path.is_file() else path.rglob("*.py"):
        wrong = [f"{file.name}:{text.lineno}: {text.value}" for text in _texts(ast.parse(file.read_text()))]
        assert not wrong


def _texts(tree: ast.Module) -> list[ast.Constant]:
    """Strings with a policy's key in them, but for docstrings, names for role_keys, and what is given to role_key."""
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for part in ast.walk(tree):
        asks = isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "role_key"
        if asks or isinstance(part, ast.DictComp):
            left_out |= {id(node) for node in ast.walk(part)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in left_out]
    return [node for node in constants if isinstance(node.value, str) and OF_A_POLICY.search(node.value)]
