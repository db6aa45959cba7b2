"""Resolution of a run's models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import Config, load_config
from mcore_rl.config.roles import ModelRole
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.installed import Installed, planned_machine
from mcore_rl.resolved.model import ResolvedModel, policy_config
from tests.tiny_models import tiny_config

CPU = Installed()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return _config(tmp_path, "deepseek_v3", num_nextn_predict_layers=1, v_head_dim=16)  # attention on GPUs takes it


def _config(directory: Path, family: str, overrides: tuple[str, ...] = (), **changes: Any) -> Config:
    (directory / "model").mkdir(exist_ok=True)
    (directory / "model" / "config.json").write_text(json.dumps(tiny_config(family).to_dict() | changes, default=str))
    path = directory / "config.yaml"
    path.write_text(f"run: {{dir: {directory}}}\nmodel: {{hf_path: {directory}/model}}\ndata: {{train: t.jsonl}}\n")
    return load_config(str(path), list(overrides))


def _policy(config: Config) -> ResolvedModel:
    return ResolvedModel.policy(ModelRole.policy(config.actor, config.model), 1)


def test_policy_config_mtp_layers_without_loss_are_omitted(config: Config) -> None:
    spec = _policy(config)
    assert spec.left_out == 1
    assert spec.arguments.mtp_num_layers == 0
    config.actor.mtp_loss_coefficient = 0.1
    spec = _policy(config)
    assert (spec.left_out, spec.arguments.mtp_num_layers) == (0, 1)


def test_policy_config_loss_for_missing_mtp_layers_is_rejected(tmp_path: Path) -> None:
    config = _config(tmp_path, "llama", ("actor.mtp_loss_coefficient=0.1",))
    with pytest.raises(ConfigError, match=r"^actor\.mtp_loss_coefficient=0\.1, but model\.hf_path=.* set .* to 0$"):
        policy_config(ModelRole.policy(config.actor, config.model))


def test_value_config_has_no_mtp_layers_or_tied_embeddings(tmp_path: Path) -> None:
    config = _config(tmp_path, "deepseek_v3", tie_word_embeddings=True)
    spec = ResolvedModel.value_model(ModelRole.critic(config.critic, config.model), 1)
    assert (spec.arguments.mtp_num_layers, spec.arguments.tied_embeddings) == (0, False)


@pytest.mark.parametrize("changes", [{"num_nextn_predict_layers": "x"}, {"model_type": "unheard_of"}])
def test_resolved_model_unknown_family_names_the_role_key(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = _config(tmp_path, "deepseek_v3", **changes)
    config.critic.hf_path = config.model.hf_path
    with pytest.raises(ConfigError, match=r"^model\.hf_path=/"):
        _policy(config)
    with pytest.raises(ConfigError, match=r"^critic\.hf_path=/"):
        ResolvedModel.value_model(ModelRole.critic(config.critic, config.model), 1)


def test_resolved_model_expert_keys_of_dense_model_are_rejected(tmp_path: Path) -> None:
    config = _config(tmp_path, "llama", ("actor.moe.aux_loss_coefficient=0.1",))
    with pytest.raises(ConfigError, match=r"^actor\.moe\.aux_loss_coefficient=0\.1, but the model has no experts"):
        _policy(config)


def test_implementation_missing_package_is_rejected_unless_planned(config: Config) -> None:
    spec, nodes = _policy(config), config.cluster.gpus_per_node
    section = replace(config.actor, recompute="selective", recompute_modules=["moe_act"])
    wants = replace(spec, role=replace(spec.role, section=section))
    with pytest.raises(ConfigError, match="needs grouped GEMM"):
        wants.implementation(nodes, CPU)
    assert wants.implementation(nodes, planned_machine(cuda=True)).transformer_engine
    assert not spec.implementation(nodes, planned_machine(cuda=False)).transformer_engine
