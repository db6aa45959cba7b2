"""Components of a model are selected from the installed packages; unavailable explicit requests are rejected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.config.models import ActorConfig, LoraConfig, MoeConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import ModelConfig
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.implementation import RECIPES, TORCH_FLASH, BuildRequest, choose, row_multiple
from mcore_rl.resolved.installed import Installed
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.resolved.recompute import MODULES, recompute_arguments
from model_converters.mapping.layout import TrainLayout
from tests.tiny_models import tiny_fields

NOTHING = Installed()
EVERYTHING = Installed(
    True,
    (10, 0),
    "2.8.0",
    flash_attention="2.8.3",
    gradient_fusion=True,
    deep_ep=True,
    linear_attention="0.4.0",
)
LINEAR = {"kv_channels": 128, "linear_attention_freq": [1, 0]}


def _request(
    sizes: Any = None, *, dtype: str = "auto", adapters: bool = False, layout: Any = None, **settings: str
) -> BuildRequest:
    """Request for a model whose experts are on four nodes, unless `layout` differs."""
    moe, lora = MoeConfig(dispatcher=settings.pop("dispatcher", "auto")), LoraConfig(rank=8 if adapters else 0)
    role = ModelRole.policy(ActorConfig(moe=moe, lora=lora, **settings), ModelConfig(hf_path="", dtype=dtype))
    sizes = {"num_moe_experts": 64, "kv_channels": 128} if sizes is None else sizes
    return BuildRequest(role, sizes, TrainLayout(64, **{"ep": 32} | (layout or {})), gpus_per_node=8)


SPREAD = _request()


def test_choose_without_gpu_selects_local_layers() -> None:
    chosen = choose(NOTHING, SPREAD)
    values = {name: choice.value for name, choice in chosen.choices()}
    assert values == {
        "layers": "local",
        "attention": "SDPA",
        "linear attention": "none",
        "norm": "torch RMSNorm",
        "rope": "unfused",
        "experts": "one by one",
        "permute": "unfused",
        "dispatcher": "alltoall",
        "fp8": "none",
        "gradient accumulation": "unfused",
    }
    assert all(choice.why for _, choice in chosen.choices())


def test_choose_float16_exchanges_tokens_without_deepep() -> None:
    assert choose(EVERYTHING, _request(dtype="float16")).dispatcher.value == "alltoall"
    assert choose(EVERYTHING, SPREAD).dispatcher.value == "deepep"


def test_choose_with_all_packages_selects_all() -> None:
    assert choose(EVERYTHING, _request(fp8="blockwise")).arguments() == {
        "apply_rope_fusion": True,
        "bias_dropout_fusion": True,
        "gradient_accumulation_fusion": True,
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "deepep",
        "fp8": "e4m3",
        "fp8_recipe": "blockwise",
    }


def test_choose_sharded_parameters_select_unfused_accumulation() -> None:
    chosen = choose(EVERYTHING, _request(layout={"shard_parameters": True}))
    assert chosen.layers.value == "TransformerEngine"
    assert not chosen.arguments()["gradient_accumulation_fusion"]


def test_choose_fsdp2_with_linear_attention_is_rejected() -> None:
    layout = {"shard_parameters": True, "hf_tensors": True}
    with pytest.raises(ConfigError, match=r"^actor\.strategy=fsdp2 .* linear attention .* set it to megatron$"):
        choose(EVERYTHING, _request({"linear_attention_freq": [1, 0]}, layout=layout, strategy="fsdp2"))


def test_choose_fsdp2_selects_layers_of_transformers() -> None:
    layout = {"ep": 1, "shard_parameters": True, "hf_tensors": True}
    sizes = {"kv_channels": 128, "num_moe_experts": 4}
    chosen = choose(EVERYTHING, _request(sizes, layout=layout, strategy="fsdp2"))
    values = {name: choice.value for name, choice in chosen.choices()}
    assert (values["layers"], values["norm"], values["attention"]) == ("transformers", "transformers", "SDPA")
    assert (values["experts"], values["permute"]) == ("grouped_mm", "transformers")
    assert chosen.dispatcher.why.startswith("not used")
    assert chosen.layers.why == "actor.strategy=fsdp2"
    assert not chosen.transformer_engine


def test_choose_adapters_select_local_layers() -> None:
    chosen = choose(EVERYTHING, _request(adapters=True))
    assert chosen.layers.value == "local"
    assert "adapters need a projection's input" in chosen.layers.why
    assert not chosen.grouped_gemm
    assert chosen.norm.value == "torch RMSNorm"


@pytest.mark.parametrize(
    ("absent", "line", "value", "why"),
    [
        ({"transformer_engine": None}, "layers", "local", "transformer-engine is not installed"),
        ({"transformer_engine": None}, "experts", "one by one", "TransformerEngine"),
        ({"transformer_engine": "2.0.0"}, "permute", "unfused", "2.1"),
        ({"transformer_engine": "1.8.0"}, "experts", "one by one", "1.9"),
        ({"transformer_engine": "1.13.0"}, "experts", "grouped GEMM", "TransformerEngine"),
        ({"flash_attention": None}, "attention", "FusedAttention", "cuDNN"),
        ({"capability": (8, 0)}, "attention", "FlashAttention 2", "flash-attn 2.1.1 to 2.8.3"),
        ({"gradient_fusion": False}, "gradient accumulation", "unfused", "apex"),
        ({"deep_ep": False}, "dispatcher", "alltoall", "deep_ep is not installed"),
        ({"cuda": False}, "dispatcher", "alltoall", "CUDA"),
        ({"cuda": False}, "layers", "local", "CUDA"),
    ],
)
def test_choose_missing_package_selects_fallback(absent: dict[str, Any], line: str, value: str, why: str) -> None:
    choice = dict(choose(replace(EVERYTHING, **absent), SPREAD).choices())[line]
    assert choice.value == value
    assert why in choice.why


@pytest.mark.parametrize(
    ("build", "value"),
    [
        (_request(layout={"ep": 8}), "alltoall"),
        (_request(layout={"ep": 8, "etp": 2}), "deepep"),
        (replace(SPREAD, gpus_per_node=None), "alltoall"),
        (_request(layout={"ep": 2}, dispatcher="deepep"), "deepep"),
        (_request(dispatcher="alltoall"), "alltoall"),
        (_request(layout={"ep": 1, "tp": 2}, dispatcher="allgather"), "allgather"),
        (_request({"kv_channels": 128}, layout={"ep": 1}), "alltoall"),
    ],
)
def test_choose_dispatcher_auto_depends_on_nodes(build: BuildRequest, value: str) -> None:
    assert choose(EVERYTHING, build).dispatcher.value == value


def test_choose_latent_attention_selects_unfused_rope() -> None:
    latent = {"multi_latent_attention": True, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    assert choose(EVERYTHING, replace(SPREAD, sizes=latent)).rope.value == "unfused"


def test_choose_factor_on_cosines_selects_unfused_rope() -> None:
    """Megatron passes no factor to TransformerEngine's kernel for packed rows."""
    chosen = choose(EVERYTHING, replace(SPREAD, rotation_factor=1.07))
    assert chosen.rope.value == "unfused"
    assert "ignores the factor 1.07 on cosines" in chosen.rope.why
    assert chosen.arguments()["apply_rope_fusion"] is False


def test_choose_rotation_of_neighbours_selects_unfused_rope() -> None:
    """Megatron does not tell TransformerEngine's kernel for packed rows to rotate neighbours, as in ERNIE-4.5."""
    chosen = choose(EVERYTHING, replace(SPREAD, sizes={**SPREAD.sizes, "rotary_interleaved": True}))
    assert chosen.rope.value == "unfused"
    assert "not neighbours" in chosen.rope.why


@pytest.mark.parametrize(
    ("machine", "dtype", "value"),
    [
        (NOTHING, "auto", "torch"),
        (EVERYTHING, "auto", "fla"),
        (replace(EVERYTHING, transformer_engine=None, linear_attention=None), "float32", "torch"),
    ],
)
def test_choose_linear_attention_depends_on_dtype(machine: Installed, dtype: str, value: str) -> None:
    chosen = choose(machine, _request(LINEAR, dtype=dtype, layout={"ep": 1})).linear_attention
    assert chosen.value == value
    assert chosen.why


@pytest.mark.parametrize(
    ("absent", "wishes", "message"),
    [
        (
            {"linear_attention": None},
            {"sizes": LINEAR, "layout": {"ep": 1}},
            r"model\.hf_path: .* flash-linear-attention; install it",
        ),
        ({"deep_ep": False}, {"dispatcher": "deepep"}, r"actor\.moe\.dispatcher=deepep needs the package deep_ep"),
        ({"cuda": False}, {"dispatcher": "deepep"}, r"actor\.moe\.dispatcher=deepep needs a CUDA device"),
        ({}, {"dispatcher": "deepep", "layout": {"ep": 1}}, r"moe\.dispatcher=deepep needs actor\.parallel\.ep > 1"),
        ({}, {"dispatcher": "allgather"}, r"actor\.moe\.dispatcher=allgather.*packed rows differ"),
        ({}, {"dispatcher": "allgather", "layout": {"ep": 1, "pp": 2}}, r"actor\.moe\.dispatcher=allgather.*pipeline"),
        ({"cuda": False}, {"fp8": "delayed"}, r"actor\.fp8=delayed needs a CUDA device"),
        ({"transformer_engine": None}, {"fp8": "delayed"}, r"actor\.fp8=delayed needs transformer-engine 1\.11.*none"),
        ({"transformer_engine": "2.1.0"}, {"fp8": "blockwise"}, r"transformer-engine 2\.3 or newer, but 2\.1\.0"),
        ({"capability": (8, 0)}, {"fp8": "delayed"}, r"compute capability 8\.9 or newer, but this one has 8\.0"),
        ({"capability": (9, 0)}, {"fp8": "mxfp8"}, r"compute capability 10\.0 or newer, before 12\.0, .* has 9\.0"),
        ({"capability": (12, 0)}, {"fp8": "mxfp8"}, r"actor\.fp8=mxfp8 .* before 12\.0, but this one has 12\.0"),
        ({"cuda_version": (12, 8)}, {"fp8": "blockwise"}, r"blockwise needs a torch for CUDA 12\.9 .* not 12\.8"),
        ({}, {"dtype": "float32"}, r"model\.dtype=float32: attention on GPUs .* set model\.dtype=bfloat16"),
    ],
)
def test_choose_unavailable_request_is_rejected(absent: dict[str, Any], wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(replace(EVERYTHING, **absent), _request(**wishes))


def test_row_multiple_depends_on_the_recipe() -> None:
    assert [row_multiple(name) for name in ("none", *RECIPES)] == [1, 16, 16, 16, 32]


# ---- recomputation ----


def _recompute(
    model: str, installed: Installed = NOTHING, *, layout: Any = None, mtp: int = 0, **actor: Any
) -> dict[str, Any]:
    hf_config = tiny_fields(model) | ({"num_nextn_predict_layers": mtp} if mtp else {})
    role = ModelRole.policy(ActorConfig(**actor), ModelConfig(hf_path=""))
    spec = ResolvedModel(role, hf_config, layout or TrainLayout(1))
    # Heads that all kernels support.
    sizes = {"num_moe_experts": spec.arguments.transformer.get("num_moe_experts"), "kv_channels": 128}
    return recompute_arguments(spec, choose(installed, BuildRequest(role, sizes, spec.layout)))


@pytest.mark.parametrize(
    ("model", "modules", "message"),
    [
        ("qwen3", ["mlp", "mlp"], "each once"),
        ("qwen3", ["attn"], r"attn is not known; known: core_attn"),
        ("qwen3", ["moe"], "the model has no experts"),
        ("qwen3", ["moe_act"], "the model has no experts"),
        ("qwen3", ["mla_up_proj"], "the model has no latent attention"),
        ("qwen3_moe", ["mlp"], "the model has no dense feed-forward layers"),
        ("gpt_oss", ["mlp"], "the model has no dense feed-forward layers"),
        ("qwen3_moe", ["shared_experts"], "the model has no shared experts"),
        ("qwen3_moe", ["moe_act"], "grouped GEMM needs TransformerEngine's layers"),
    ],
)
def test_recompute_missing_module_is_rejected(model: str, modules: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"actor\.recompute_modules=.*{message}"):
        _recompute(model, recompute="selective", recompute_modules=modules)


def test_recompute_existing_modules_are_accepted() -> None:
    for name in MODULES:
        found = _recompute("deepseek_v3", EVERYTHING, recompute="selective", recompute_modules=[name])
        assert found == {"recompute_granularity": "selective", "recompute_modules": [name]}
    with pytest.raises(ConfigError, match=r"moe_act cannot be recomputed with actor\.fp8=delayed"):
        _recompute("qwen3_moe", EVERYTHING, fp8="delayed", recompute="selective", recompute_modules=["moe_act"])


@pytest.mark.parametrize(
    ("model", "installed", "fp8", "modules"),
    [
        ("deepseek_v3", EVERYTHING, "none", ["layernorm", "moe_act", "mla_up_proj"]),
        ("qwen3_moe", EVERYTHING, "none", ["layernorm", "moe_act"]),
        ("deepseek_v3", EVERYTHING, "delayed", ["mla_up_proj"]),
        ("qwen3_moe", EVERYTHING, "delayed", ["core_attn"]),
        # TransformerEngine stores no activations of a dense model's norms.
        ("qwen3", EVERYTHING, "none", ["mlp"]),
        ("deepseek_v3", NOTHING, "none", ["core_attn"]),
        ("qwen3", NOTHING, "none", ["core_attn"]),
    ],
)
def test_recompute_default_modules_depend_on_the_model(
    model: str, installed: Installed, fp8: str, modules: list[str]
) -> None:
    found = _recompute(model, installed, fp8=fp8, recompute="selective")
    assert found == {"recompute_granularity": "selective", "recompute_modules": modules}


def test_recompute_mtp_layers_need_one_layer_blocks() -> None:
    with pytest.raises(ConfigError, match=r"actor\.recompute_layers=2.*one by one"):
        _recompute("deepseek_v3", mtp=1, recompute="full", recompute_layers=2)


def test_recompute_layers_must_divide_stages() -> None:
    full = {"recompute": "full", "recompute_layers": 2}
    assert _recompute("qwen3", layout=TrainLayout(2, pp=2), **full)["recompute_num_layers"] == 2
    with pytest.raises(ConfigError, match=r"actor\.recompute_layers=2 does not divide the 1 layers"):
        _recompute("qwen3", layout=TrainLayout(2, pp=2, pipeline_layout="Ettt|tL"), **full)


SINKS = {"num_moe_experts": 8, "kv_channels": 64, "softmax_type": "learnable", "window_size": (127, 0)}
WINDOWS = {"kv_channels": 64, "window_size": (127, 0)}
CHOSEN = {"num_moe_experts": 8, "kv_channels": 64, "dsa_indexer_topk": 2048}


@pytest.mark.parametrize(
    ("installed", "request_", "message"),
    [
        (EVERYTHING, _request(SINKS, dtype="float32"), r"model\.dtype=float32: .*2\.12 .* set model\.dtype=bfloat16"),
        (Installed(True, (7, 5)), _request(SINKS), r"model\.hf_path: .* sinks .* compute capability 8\.0, .* has 7\.5"),
        (
            Installed(True, (9, 0)),
            _request(WINDOWS | {"kv_channels": 320}),
            r"model\.hf_path: .* windows, .* head sizes up to 256, but the model has 320",
        ),
        (EVERYTHING, _request(CHOSEN), r"model\.hf_path: no attention .* \(index_topk\).*0\.16\.1.* train .* on CPUs"),
    ],
)
def test_choose_attention_variant_unsupported_on_gpus_is_rejected(
    installed: Installed, request_: BuildRequest, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(installed, request_)


PLAIN = {"kv_channels": 64}
ALONE = {"ep": 1}
SEVERAL = {"ep": 1, "cp": 2}
WITHOUT_ENGINE = replace(EVERYTHING, transformer_engine=None)


@pytest.mark.parametrize(
    ("installed", "request_", "attention"),
    [
        (NOTHING, _request(SINKS), "SDPA"),
        (NOTHING, _request(CHOSEN), "SDPA"),
        (NOTHING, _request(WINDOWS, layout=SEVERAL), "SDPA"),
        (EVERYTHING, _request(WINDOWS, layout=ALONE), "FusedAttention"),
        (EVERYTHING, _request(PLAIN, layout=SEVERAL), "FusedAttention"),
        (EVERYTHING, _request(SINKS), TORCH_FLASH),
        (WITHOUT_ENGINE, _request(SINKS), TORCH_FLASH),
        (EVERYTHING, _request(SINKS, layout={"ep": 32, "cp": 2}), TORCH_FLASH),
        (EVERYTHING, _request(WINDOWS, layout=SEVERAL), TORCH_FLASH),
        (EVERYTHING, _request(WINDOWS, layout=ALONE, adapters=True), TORCH_FLASH),
        (EVERYTHING, _request(PLAIN, layout=SEVERAL, adapters=True), TORCH_FLASH),
        (WITHOUT_ENGINE, _request(PLAIN, layout=SEVERAL), TORCH_FLASH),
        (WITHOUT_ENGINE, _request(PLAIN, layout=ALONE), "SDPA"),
    ],
)
def test_choose_attention_supports_windows_sinks_and_ranks(
    installed: Installed, request_: BuildRequest, attention: str
) -> None:
    chosen = choose(installed, request_)
    assert chosen.attention.value == attention
    assert chosen.own_attention == (attention in ("SDPA", TORCH_FLASH))
