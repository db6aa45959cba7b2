"""A parallel layout that does not fit the model is rejected with the key to change."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.config.models import ActorConfig, MoeConfig, ParallelConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import ModelConfig
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.layout import check_experts, model_arguments, role_layout, train_layout
from model_converters.mapping.layout import TrainLayout
from tests.tiny_models import tiny_fields

DENSE, SPARSE, LATENT = tiny_fields("qwen3"), tiny_fields("qwen3_moe"), tiny_fields("deepseek_v3")
BIASED = tiny_fields("gpt_oss")
LINEAR = tiny_fields("qwen3_5_text")
ONE_NORM = tiny_fields("minimax_m2")


@pytest.mark.parametrize(
    ("model", "world_size", "sizes", "key"),
    [
        (SPARSE, 3, {"ep": 3}, r"actor\.parallel\.ep=3 does not divide the model's 8 experts"),
        (SPARSE, 2, {"ep": 4}, r"actor\.parallel\.ep"),
        (SPARSE, 10, {"tp": 2, "etp": 5}, r"actor\.parallel\.etp=5"),
        (BIASED, 2, {"tp": 2, "etp": 2}, r"actor\.parallel\.etp=2: megatron .* experts with biases; set it to 1"),
        (DENSE | {"num_attention_heads": 6}, 3, {"tp": 3}, r"actor\.parallel\.tp=3.*2 key/value heads"),
        (SPARSE, 8, {"tp": 8}, r"actor\.parallel\.tp=8.*4 attention heads"),
        (DENSE, 2, {"ep": 2}, r"actor\.parallel\.ep=2.*no experts"),
        (DENSE, 2, {"tp": 2, "etp": 1}, r"actor\.parallel\.etp=1.*no experts"),
        (DENSE, 3, {"tp": 2}, r"actor\.parallel\.tp"),
        (DENSE | {"intermediate_size": 49}, 2, {"tp": 2}, r"actor\.parallel\.tp=2.*49 units"),
        (LATENT | {"moe_intermediate_size": 25}, 2, {"tp": 2}, r"actor\.parallel\.tp=2.*25 units of the shared"),
        (LATENT, 8, {"tp": 8}, r"actor\.parallel\.tp=8.*4 attention heads"),
        (DENSE, 3, {"pp": 3}, r"actor\.parallel\.pp 3.*4 layers"),
        (DENSE, 2, {"pp": 2, "vpp": 3}, r"actor\.parallel\.vpp 3 .* 2 layers"),
        (DENSE, 2, {"pp": 2, "first_stage_layers": 4}, r"actor\.parallel\..*first_stage_layers"),
        (DENSE, 2, {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 2}, r"last_stage_layers"),
        (DENSE, 1, {"vpp": 2}, r"actor\.parallel\.vpp 2 needs .* set pp > 1"),
        (DENSE, 1, {"last_stage_layers": 2}, r"actor\.parallel\.first_stage_layers and last_stage_layers need.*pp > 1"),
        (DENSE, 2, {"pp": 2, "pipeline_layout": "Ettt|ttL"}, r"actor\.parallel\.pipeline_layout.*places 5.*has 4"),
        (DENSE, 2, {"pp": 2, "pipeline_layout": "tttt|EL"}, r"actor\.parallel\.pipeline_layout.*begin with E"),
        (DENSE, 2, {"pp": 2, "vpp": 2, "pipeline_layout": "Ettt|tL"}, r"actor\.parallel\.pipeline_layout.*vpp is 2"),
        (DENSE, 2, {"pp": 2, "pipeline_layout": "Ettt|tmL"}, r"actor\.parallel\.pipeline_layout.*mtp_loss_coefficient"),
        (DENSE, 2, {"pp": 2, "last_stage_layers": 1, "pipeline_layout": "Ettt|tL"}, r"pipeline_layout replaces"),
        (DENSE, 1, {"sequence_parallel": True}, r"actor\.parallel\.sequence_parallel=true needs actor\.parallel\.tp"),
        (SPARSE, 2, {"tp": 2, "sequence_parallel": False}, r"actor\.parallel\.sequence_parallel=false.*mixture"),
        (LATENT, 2, {"tp": 2, "sequence_parallel": False}, r"actor\.parallel\.sequence_parallel=false.*one rank's"),
        (LINEAR, 2, {"cp": 2}, r"actor\.parallel\.cp=2, but the model has linear attention.* set it to 1"),
        (LINEAR, 4, {"tp": 4}, r"actor\.parallel\.tp=4 does not divide the model's 2 key heads of linear attention"),
        (ONE_NORM, 4, {"tp": 4}, r"actor\.parallel\.tp=4 does not divide the model's 2 key/value heads, over which"),
        (DENSE | {"model_type": "gpt2"}, 1, {}, r"model\.hf_path.*gpt2.*qwen3"),
    ],
)
def test_train_layout_misfit_names_the_key(
    model: dict[str, Any], world_size: int, sizes: dict[str, int], key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        train_layout(ParallelConfig(**sizes), world_size, model)


@pytest.mark.parametrize(
    ("model", "world_size", "sizes", "etp"),
    [
        (SPARSE, 2, {"tp": 2, "ep": 2}, 1),
        (SPARSE, 2, {"tp": 2}, 2),
        (DENSE, 2, {"tp": 2}, 2),
        (SPARSE, 4, {"ep": 2}, 1),
        (BIASED, 2, {"tp": 2}, 1),
    ],
)
def test_train_layout_etp_default_depends_on_ep(
    model: dict[str, Any], world_size: int, sizes: dict[str, int], etp: int
) -> None:
    assert train_layout(ParallelConfig(**sizes), world_size, model).etp == etp


def test_role_layout_fsdp2_with_biased_experts_is_rejected() -> None:
    role = ModelRole.policy(ActorConfig(strategy="fsdp2"), ModelConfig(hf_path=""))
    with pytest.raises(ConfigError, match=r"actor\.strategy=fsdp2 .* experts with biases .*set actor\.strategy"):
        role_layout(role, 2, BIASED)


def test_train_layout_vpp_of_one_is_none() -> None:
    """Megatron's interleaved schedule requires more than one chunk."""
    assert train_layout(ParallelConfig(pp=2, vpp=1), 2, DENSE).vpp is None


def test_train_layout_all_sparse_model_ignores_dense_width() -> None:
    assert train_layout(ParallelConfig(tp=2), 2, SPARSE | {"intermediate_size": 49}).tp == 2


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (DENSE, {"aux_loss_coefficient": 0.1}, r"actor\.moe\.aux_loss_coefficient=0\.1.*no experts; set it to 0"),
        (DENSE, {"router_replay": "policy"}, r"actor\.moe\.router_replay=policy.*no experts; set it to none"),
        (DENSE, {"router_replay": "engine"}, r"actor\.moe\.router_replay=engine.*no experts; set it to none"),
        (SPARSE, {"bias_update_rate": 0.1}, r"actor\.moe\.bias_update_rate=0\.1.*no correction bias"),
    ],
)
def test_check_experts_settings_without_effect_are_rejected(
    model: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_experts(MoeConfig(**settings), model_arguments(model).transformer)


def test_check_experts_supported_settings_pass() -> None:
    check_experts(MoeConfig(bias_update_rate=0.1, z_loss_coefficient=0.1), model_arguments(LATENT).transformer)
    check_experts(MoeConfig(router_replay="policy", aux_loss_coefficient=0.1), model_arguments(SPARSE).transformer)


@pytest.mark.parametrize("model", [DENSE, SPARSE, LATENT])
def test_role_layout_of_fsdp2_shards_hf_tensors(model: dict[str, Any]) -> None:
    role = ModelRole.policy(ActorConfig(strategy="fsdp2"), ModelConfig(hf_path=""))
    assert role_layout(role, 2, model) == TrainLayout(2, shard_parameters=True, hf_tensors=True)


def test_role_layout_of_fsdp2_with_experts_in_other_layers_is_rejected() -> None:
    """transformers ignores moe_layer_freq: its layers 1 and 3 would have experts too."""
    model = LATENT | {"moe_layer_freq": 2}
    role = ModelRole.policy(ActorConfig(strategy="fsdp2"), ModelConfig(hf_path=""))
    with pytest.raises(ConfigError, match=r"actor\.strategy=fsdp2 does not support moe_layer_freq 2 in model\.hf_path"):
        role_layout(role, 2, model)
    role_layout(role, 2, model | {"first_k_dense_replace": model["num_hidden_layers"]})  # all layers are dense
    role_layout(ModelRole.policy(ActorConfig(), ModelConfig(hf_path="")), 2, model)
