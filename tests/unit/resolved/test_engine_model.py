"""A run whose engine would compute a different model than its trainer is rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import Config, load_config
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.model import (
    ResolvedModel,
    check_engine_model,
    check_policy_engines,
    overridden_fields,
    policy_config,
)
from tests.tiny_models import OSS, YARN, tiny_fields


def run_of(directory: Path, kind: str, changes: dict[str, Any], *overrides: str) -> Config:
    fields = tiny_fields(kind) | changes
    (directory / "config.json").write_text(json.dumps(fields))
    path = directory / "config.yaml"
    path.write_text(f"run: {{dir: {directory}}}\nmodel: {{hf_path: {directory}}}\ndata: {{train: t.jsonl}}\n")
    return load_config(str(path), list(overrides))


def policy_fields(config: Config) -> dict[str, object]:
    return policy_config(ModelRole.policy(config.actor, config.model))[0]


def checked(config: Config) -> None:
    check_engine_model(EngineRole.rollout(config.rollout, config.model), config.algorithm, policy_fields(config))


REJECTED = [
    *(
        ("gpt_oss", key, OSS | {key: value}, "vllm")
        for key, value in {
            "swiglu_limit": 1.0,
            "rms_norm_eps": 1e-6,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        }.items()
    ),
    (
        "gpt_oss",
        "attention_factor",
        OSS | {"rope_parameters": YARN | {"attention_factor": 2.0}},
        "vllm",
    ),
    ("gpt_oss", "model_type", OSS, "sglang"),
    ("qwen2", "head_dim", {"head_dim": 12}, "vllm"),
    ("qwen2", "head_dim", {"head_dim": 12}, "sglang"),
    ("mixtral", "head_dim", {"head_dim": 12}, "sglang"),
    ("qwen3_moe", "tie_word_embeddings", {"tie_word_embeddings": True}, "sglang"),
    ("deepseek_v3", "tie_word_embeddings", {"tie_word_embeddings": True}, "vllm"),
    ("llama", "text_config", {"text_config": {"num_hidden_layers": 2}}, "vllm"),
    ("deepseek_v3", "rms_norm_eps", {"rms_norm_eps": 1e-3}, "vllm"),
    ("deepseek_v3", "compress_ratios", {"compress_ratios": None}, "vllm"),
]


@pytest.mark.parametrize(("kind", "key", "changes", "engine"), REJECTED)
def test_run_whose_engine_computes_another_model_is_rejected(
    tmp_path: Path, kind: str, key: str, changes: dict[str, Any], engine: str
) -> None:
    config = run_of(tmp_path, kind, changes, f"rollout.engine={engine}")
    with pytest.raises(ConfigError, match=rf"^model\.hf_path=.*config\.json: .*\b{key}\b .*not supported"):
        checked(config)
    config.algorithm.policy_loss.name = "sft"  # has no engine
    checked(config)


def test_divided_experts_with_biases_are_rejected_beside_engines(tmp_path: Path) -> None:
    config = run_of(tmp_path, "gpt_oss", OSS, "rollout.tp=2")
    spec = ResolvedModel.policy(ModelRole.policy(config.actor, config.model), 1)
    engines = EngineRole.rollout(config.rollout, config.model)
    with pytest.raises(ConfigError, match=r"^rollout\.tp=2: .*gpt_oss have biases.* set rollout\.expert_parallel=true"):
        check_policy_engines(engines, config.algorithm, spec)
    config.rollout.expert_parallel = True
    check_policy_engines(engines, config.algorithm, spec)


def test_engine_that_reads_the_field_accepts_it(tmp_path: Path) -> None:
    for kind, changes, engine in (
        ("mixtral", {"head_dim": 12}, "vllm"),
        ("qwen3_moe", {"tie_word_embeddings": True}, "vllm"),
    ):
        checked(run_of(tmp_path, kind, changes, f"rollout.engine={engine}"))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "glm4_moe"])
def test_chunked_attention_is_rejected_before_start(tmp_path: Path, kind: str) -> None:
    config = run_of(tmp_path, kind, {"dual_chunk_attention_config": {"chunk_size": 64}, "head_dim": 8})
    with pytest.raises(ConfigError, match="dual_chunk_attention_config"):
        checked(config)


def test_overridden_field_is_named_in_a_note(tmp_path: Path) -> None:
    config = run_of(tmp_path, "llama", {"sliding_window": 8, "logit_scale": 0.5})
    (note,) = overridden_fields(config.model, policy_fields(config))
    assert "logit_scale=1.0, sliding_window=null" in note
    config = run_of(tmp_path, "llama", {"sliding_window": None, "logit_scale": 1.0})
    assert overridden_fields(config.model, policy_fields(config)) == []
