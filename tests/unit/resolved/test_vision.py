"""Settings that a vision tower does not support."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.config import Config, load_config
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.validation import check_engine_sizes
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.installed import Installed
from mcore_rl.resolved.model import ResolvedModel
from model_converters.vision_model import nested_fields
from tests.tiny_models import tiny_fields


def _resolve(directory: Path, kind: str, *overrides: str, ranks: int = 1, critic: bool = False) -> ResolvedModel:
    (directory / "config.json").write_text(json.dumps(nested_fields(tiny_fields(kind))))
    path = directory / "config.yaml"
    path.write_text(f"run: {{dir: {directory}}}\nmodel: {{hf_path: {directory}}}\ndata: {{train: t.jsonl}}\n")
    config = load_config(str(path), list(overrides))
    if critic:
        return ResolvedModel.value_model(ModelRole.critic(config.critic, config.model), ranks)
    return ResolvedModel.policy(ModelRole.policy(config.actor, config.model), ranks)


def test_policy_with_tower_is_resolved_from_nested_file(tmp_path: Path) -> None:
    spec = _resolve(tmp_path, "qwen3_vl", "actor.train_vision=true", "actor.parallel.pp=2", ranks=2)
    assert spec.arguments.vision is not None
    assert spec.arguments.vision.deepstack == 2
    assert spec.hf_config["num_hidden_layers"] == 4


def test_rotation_by_three_positions_is_never_fused(tmp_path: Path) -> None:
    """TransformerEngine's kernel for packed rows has one angle per position."""
    gpu = Installed(cuda=True, transformer_engine="2.11", capability=(9, 0), flash_attention="2.8.3")
    spec = _resolve(tmp_path, "qwen3_vl", "model.dtype=bfloat16")
    assert spec.implementation(None, gpu).rope.value == "unfused"


@pytest.mark.parametrize(
    ("kind", "overrides", "ranks", "message"),
    [
        (
            "qwen3",
            ("actor.train_vision=true",),
            1,
            r"^actor\.train_vision=true: .* has no vision tower",
        ),
        ("qwen3_vl", ("actor.strategy=fsdp2",), 1, r"^actor\.strategy=fsdp2 is not supported with the vision tower"),
        ("qwen3_vl", ("actor.parallel.shard_parameters=true",), 1, r"^actor\.parallel\.shard_parameters=true is not"),
        ("qwen3_vl", ("actor.fp8=blockwise",), 1, r"^actor\.fp8=blockwise is not supported with the vision tower"),
        (
            "qwen3_vl",
            ("actor.train_vision=true", "actor.overlap_grad_reduce=true"),
            1,
            r"^actor\.overlap_grad_reduce=true is not supported with actor\.train_vision=true",
        ),
        (
            "qwen3_vl",
            ("actor.parallel.pp=4",),
            4,
            r"^actor\.parallel\.pp=4: the first pipeline stage has 1 layers",
        ),
        (
            "qwen3_vl",
            ("actor.parallel.pp=2", "actor.parallel.vpp=2"),
            2,
            r"^actor\.parallel\.pp=2: the first virtual pipeline stage has 1 layers",
        ),
    ],
)
def test_setting_without_support_for_towers_is_rejected(
    kind: str, overrides: tuple[str, ...], ranks: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolve(tmp_path, kind, *overrides, ranks=ranks)


def test_critic_with_tower_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'qwen3_vl' has a vision tower, which critics and reward models do not"):
        _resolve(tmp_path, "qwen3_vl", critic=True)


def test_engine_sizes_of_nested_text_model_are_checked() -> None:
    config = Config()
    config.rollout.tp = 3
    role = EngineRole.rollout(config.rollout, config.model)
    with pytest.raises(ConfigError, match=r"^rollout\.tp=3 must divide the model's 4 attention heads"):
        check_engine_sizes(role, nested_fields(tiny_fields("qwen3_vl")), cuda=False)


def test_sglang_ranks_of_a_model_with_tower_are_rejected() -> None:
    config = Config()
    config.rollout.engine, config.rollout.tp = "sglang", 2
    config.rollout.max_prompt_tokens = config.rollout.max_response_tokens = 64
    role, model = EngineRole.rollout(config.rollout, config.model), nested_fields(tiny_fields("qwen3_vl"))
    with pytest.raises(ConfigError, match=r"^rollout\.tp=2: SGLang with a vision tower .*; set it to 1"):
        check_engine_sizes(role, model, cuda=False)
    config.rollout.tp = 1
    check_engine_sizes(role, model, cuda=False)
