"""Teachers that cannot be used are rejected before a process starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_checkpoint import tiny_fields
from tiny_tokenizer import write as write_tokenizer

from mcore_rl.algorithms import estimator
from mcore_rl.config.models import ActorConfig, ParallelConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import Config, ModelConfig
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import ConfigError
from mcore_rl.preparation.teacher import check_teacher, check_vocabulary
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.resolved.teacher import resolved_teacher


def write_config(directory: Path, kind: str, **changes: Any) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny_fields(kind, **changes)))
    return str(directory)


def run_of(tmp_path: Path, policy: str, teacher: str, ranks: int, changes: dict[str, Any], **parallel: int) -> Config:
    config = Config()
    config.model = ModelConfig(hf_path=write_config(tmp_path / "policy", policy), dtype="float32")
    config.teacher.hf_path = write_config(tmp_path / "teacher", teacher, **changes)
    config.actor = ActorConfig(parallel=ParallelConfig(**parallel), num_ranks=ranks)
    return config


def policy_of(config: Config) -> ResolvedModel:
    return ResolvedModel.policy(ModelRole.policy(config.actor, config.model), config.num_trainer_ranks)


def test_teacher_without_experts_joins_expert_parallel_ranks(tmp_path: Path) -> None:
    config = run_of(tmp_path, "qwen3_moe", "qwen3", 4, {}, tp=2, ep=2)
    policy = policy_of(config)
    spec = resolved_teacher(config.teacher, policy)
    assert (policy.layout.ep, spec.layout.ep) == (2, 1)
    # The same place in every group that the teacher uses.
    for rank in range(4):
        ours, theirs = (layout.coordinates(rank) for layout in (policy.layout, spec.layout))
        assert (ours.tp, ours.pp, ours.dp, ours.cp) == (theirs.tp, theirs.pp, theirs.dp, theirs.cp)


@pytest.mark.parametrize(
    ("kinds", "changes", "parallel", "teacher", "message"),
    [
        (
            ("qwen3", "qwen3"),
            {"num_hidden_layers": 3},
            {"pp": 2},
            {},
            r"does not fit the layout of the actor.*parallel",
        ),
        (
            ("qwen3", "qwen3"),
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            {"tp": 2},
            {},
            r"does not fit.*actor\.parallel\.tp=2",
        ),
        (
            ("qwen3_moe", "qwen3_moe"),
            {"num_experts": 7},
            {"ep": 2},
            {},
            r"does not fit.*actor\.parallel\.ep=2 does not",
        ),
        (
            ("qwen3", "qwen3"),
            {"vocab_size": 64},
            {},
            {},
            r"has vocab_size 64 in config\.json, and the policy \d+: tokens",
        ),
        (
            ("qwen3", "qwen3"),
            {"vocab_size": 640},
            {},
            {"in_loss": 0.1},
            r"teacher\.in_loss=0\.1 compares.*vocab_size 640",
        ),
        (("qwen3", "qwen3"), {}, {}, {"in_loss": 0.1, "top_k": 9999}, r"^teacher\.top_k=9999 must be below the \d+"),
    ],
)
def test_resolved_teacher_that_does_not_fit_is_rejected(
    tmp_path: Path,
    kinds: tuple[str, str],
    changes: dict[str, Any],
    parallel: dict[str, int],
    teacher: dict[str, Any],
    message: str,
) -> None:
    config = run_of(tmp_path, *kinds, 2, changes, **parallel)
    for name, value in teacher.items():
        setattr(config.teacher, name, value)
    with pytest.raises(ConfigError, match=message) as raised:
        resolved_teacher(config.teacher, policy_of(config))
    assert "teacher." in str(raised.value)


def test_resolved_teacher_with_more_padding_rows_passes_without_kl(tmp_path: Path) -> None:
    """Checkpoints of one tokenizer differ in the rows of their embeddings, such as those of Qwen2.5."""
    config = run_of(tmp_path, "qwen3", "qwen3", 1, {"vocab_size": 640})
    assert resolved_teacher(config.teacher, policy_of(config)).arguments.vocab_size == 640


def test_check_teacher_alone_with_critic_is_rejected(tmp_path: Path) -> None:
    config = run_of(tmp_path, "qwen3", "qwen3", 1, {})
    config.teacher.alone, config.algorithm.advantage = True, "gae"
    with pytest.raises(ConfigError, match=r"^teacher\.alone=true drops the advantages of algorithm\.advantage=gae"):
        check_teacher(config, policy_of(config), estimator("gae"))


def test_check_vocabulary_names_the_first_other_token(tmp_path: Path) -> None:
    for name in ("policy", "same", "other"):
        write_tokenizer(tmp_path / name)
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path / "policy"))
    config: Any = SimpleNamespace(teacher=Config().teacher)
    check_vocabulary(config, tokenizer)
    config.teacher.hf_path = str(tmp_path / "same")
    check_vocabulary(config, tokenizer)
    config.teacher.hf_path = str(tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"^teacher\.hf_path=.*another vocabulary than the policy: 2 tokens differ"
    ) as e:
        check_vocabulary(config, tokenizer)
    ids = tokenizer.get_vocab()
    assert f"such as {first!r} with id {ids[first]} for the policy and id {ids[second]} for the teacher" in str(e.value)


def test_check_vocabulary_without_tokenizer_names_the_key(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "policy")
    config: Any = SimpleNamespace(teacher=Config().teacher)
    config.teacher.hf_path = write_config(tmp_path / "teacher", "qwen3")
    with pytest.raises(ConfigError, match=r"^teacher\.hf_path: .* contains no tokenizer"):
        check_vocabulary(config, load_tokenizer(str(tmp_path / "policy")))
