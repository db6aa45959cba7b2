"""Engines compute what transformers computes, for each family: with the weights of an export, and after each update.

config.json also has the fields that only engines read, with values of another model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from mcore_rl.errors import ConfigError, WeightSyncError
from mcore_rl.weights.transports.segments import SHARED_MEMORY
from model_converters.families import FAMILIES
from model_converters.mapping.layout import TrainLayout
from tests.contract.engines import (
    DELTA_NETS,
    DIVIDED_BY_TWO,
    EVERY_EXPERT,
    LATENT,
    NEEDS_TORCHVISION,
    ON_DEMAND,
    WITH_SGLANG,
    RemoteEngine,
    families_of_engines,
)
from tests.contract.hf_trainer import HFTrainer
from tests.contract.test_vision_engine import FAMILIES_IN_VLLM
from tests.contract.update_checks import check_close, check_greedy
from tests.engine_fields import OTHER_VALUES
from tests.exported import export_through
from tests.selection import on_demand_unless
from tests.tiny_models import GROUPS, LLAMA3, OSS, YARN, write_tiny_model

GREEDY_GROUPS = {"n_group": 4, "topk_group": 2, "topk_method": "greedy", "n_routed_experts": 8}
WITHOUT_MSCALE = YARN | {"beta_fast": None, "mscale": None, "mscale_all_dim": None}
SHORT_LLAMA3 = LLAMA3 | {"low_freq_factor": 2.0, "original_max_position_embeddings": 64}
SCALED_YARN = YARN | {"attention_factor": 1.3, "beta_fast": None, "truncate": False}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4}
Fields = dict[str, Any]
CASES: dict[str, tuple[str, Fields, Fields, TrainLayout]] = {
    "llama": ("llama", {"rope_parameters": SHORT_LLAMA3}, {}, TrainLayout(4, tp=2, pp=2)),
    # SGLang scales positions within max_position_embeddings too, unless config.json is overridden.
    "qwen2": ("qwen2", {"rope_parameters": DYNAMIC}, {}, TrainLayout(4, tp=2, pp=2)),
    "qwen3": (
        "qwen3", {"tie_word_embeddings": True, "rope_parameters": SCALED_YARN}, {}, TrainLayout(4, tp=2, pp=2)
    ),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [0]}, {}, TrainLayout(4, pp=2, ep=2)),
    "mixtral": ("mixtral", {}, {"rope_parameters": LINEAR}, TrainLayout(4, pp=2, ep=2)),
    "minimax_m2": ("minimax_m2", {}, {"rotary_dim": 16}, TrainLayout(4, tp=2, ep=2)),
    "ernie4_5_moe": ("ernie4_5_moe", {}, {}, TrainLayout(4, pp=2, ep=2)),
    "glm4_moe": ("glm4_moe", {}, {}, TrainLayout(4, tp=2, ep=2)),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        LATENT | {"mlp_layer_types": ["dense", "sparse"], "first_k_dense_replace": 1},
        {},
        TrainLayout(4, tp=2, ep=2),
    ),
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": [0]}, {}, TrainLayout(4, pp=2, ep=2)),
    "seed_oss": ("seed_oss", {}, {}, TrainLayout(4, tp=2, pp=2)),
    "gpt_oss": ("gpt_oss", OSS, {}, TrainLayout(4, pp=2, ep=2)),
    "gemma3_text": (
        "gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}, {}, TrainLayout(4, tp=2, pp=2)
    ),
    "gemma3_text, tied": (
        "gemma3_text", {"layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": True},
        {},
        TrainLayout(4, tp=2, pp=2),
    ),
    "glm4_moe, whole heads rotate": (
        "glm4_moe",
        {},
        {"partial_rotary_factor": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        TrainLayout(4, pp=2, ep=2),
    ),
    "deepseek_v2": (
        "deepseek_v2", LATENT | GREEDY_GROUPS, {"rope_parameters": WITHOUT_MSCALE}, TrainLayout(4, tp=2, ep=2)
    ),
    "deepseek_v3": (
        "deepseek_v3", LATENT | GROUPS | {"rope_parameters": YARN}, {}, TrainLayout(4, pp=2, tp=2, ep=2)
    ),
    "kimi_k2": (
        "kimi_k2",
        LATENT | {"q_lora_rank": None},
        {"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": 0}},
        TrainLayout(4, pp=2, ep=2),
    ),
}  # fmt: skip
"""Family, fields of the model, fields that replace those in the config.json that transformers saves, and the trainer
layout that exports the engine's first weights."""
NET_CASES: dict[str, TrainLayout] = {
    "qwen3_next": TrainLayout(4, tp=2, ep=2),
    "qwen3_5_text": TrainLayout(4, tp=2, pp=2),
    "qwen3_5_moe_text": TrainLayout(4, pp=2, ep=2),
}
WITH_SGLANG_ALWAYS = ("qwen2", "glm4_moe")
"""Always tested with SGLang, whose restart imports it again; the others on demand."""


SGLANG_FIELDS: dict[str, Fields] = {
    "qwen3_moe": {"mlp_only_layers": []},
    # Latent attention without YaRN is rejected on CPU.
    "glm4_moe_lite": {"rope_parameters": YARN},
}
"""Fields of a family's model for SGLang."""
NOT_ON_SGLANG = ("qwen2_moe",)
"""Rejected on CPU by config.rules.engine_support."""
SAME_CLASSES = ("kimi_k2", "glm4_moe, whole heads rotate")
"""Models of classes that another case tests; on demand."""
LIKE_OTHERS = ("llama", "qwen3", "mixtral", "seed_oss", "glm4_moe_lite", "gemma3_text")
"""Families whose tensors are arranged as in another case; on demand."""
ENGINE_CASES = [
    pytest.param(
        *case.values,
        marks=case.marks if case.values[1] not in (*SAME_CLASSES, *LIKE_OTHERS) else [*case.marks, *ON_DEMAND],
    )
    for case in families_of_engines(CASES, WITH_SGLANG_ALWAYS)
    if case.values[0] not in FAMILIES[CASES[str(case.values[1])][0]].refused_by_engines
    and (case.values[0] != "sglang" or case.values[1] not in NOT_ON_SGLANG)
]


def test_families_supported_on_vllm_cpu_are_tested() -> None:
    tested = {family for family, *_ in CASES.values()} | NET_CASES.keys() | {*FAMILIES_IN_VLLM}
    assert tested == {name for name, family in FAMILIES.items() if family.description.vllm_cpu == "runs"}


def change_config(directory: Path, fields: Fields) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def exported_model(directory: Path, family: str, fields: Fields, replaced: Fields, layout: TrainLayout) -> Any:
    """Write a model to directory/exported, with fields that only engines read; return it as transformers reads it.

    Sizes: vLLM's Qwen2 computes head_dim as hidden_size / heads, and its CPU attention requires head_dim 32.
    """
    from transformers import AutoModelForCausalLM

    saved, known = directory / "saved", FAMILIES[family]
    sizes = {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 2}
    write_tiny_model(saved, known.transformers_type or family, **(sizes | fields))
    change_config(saved, replaced)
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager").eval()
    change_config(saved, {"model_type": family})
    export_through(saved, directory / "exported", layout)
    excluded = known.own_fields | known.absent_for_engines
    change_config(directory / "exported", {key: value for key, value in OTHER_VALUES.items() if key not in excluded})
    return model


def check_two_updates(engine: RemoteEngine, model: Any, check: Callable[[RemoteEngine, Any, int], None]) -> None:
    """Check the engine's start and two certified updates with `check`."""
    check(engine, model, 0)
    trainer = HFTrainer(model, engine, 40 << 10, 2)
    for version in (1, 2):
        trainer.perturb(version)
        with pytest.raises(WeightSyncError, match="differ"):
            trainer.certify()
        trainer.publish(version)
        check(engine, model, version)
        assert trainer.certify() > 10


@pytest.mark.parametrize(("process", "case"), ENGINE_CASES, indirect=["process"])
def test_family_from_export_and_after_updates_is_exact(process: RemoteEngine, case: str, tmp_path: Path) -> None:
    family, fields, replaced, layout = CASES[case]
    if process.kind == "sglang":
        fields = fields | SGLANG_FIELDS.get(family, {})
        replaced = {} if family == "mixtral" else replaced  # it reads no scaling
    model = exported_model(tmp_path, family, fields, replaced, layout)
    engine = process.start(tmp_path / "exported")
    check_two_updates(engine, model, check_greedy)


@pytest.mark.parametrize("process", ["vllm"], indirect=True)
def test_updates_of_release_in_mxfp4_are_exact(process: RemoteEngine, tmp_path: Path) -> None:
    """The engine gets bfloat16 or float32 weights from the trainer, not the codes of the release."""
    model = exported_model(tmp_path, "gpt_oss", OSS, {}, TrainLayout(1))
    change_config(tmp_path / "exported", {"quantization_config": {"quant_method": "mxfp4"}})
    engine = process.start(tmp_path / "exported", load_weights=False)
    trainer = HFTrainer(model, engine, 40 << 10, 2)
    trainer.perturb(1)
    trainer.publish(1)
    check_greedy(engine, model, 1)
    assert trainer.certify() > 10


def families_with_nets() -> list[ParameterSet]:
    """Return all NET_CASES; those whose class in vLLM imports torchvision need this package. The dense model runs on
    demand: qwen3_5_moe_text has the same layers with experts."""
    return [
        pytest.param(
            family,
            marks=[
                *([NEEDS_TORCHVISION] if FAMILIES[family].vllm_imports else []),
                *on_demand_unless(family != "qwen3_5_text"),
            ],
        )
        for family in NET_CASES
    ]


@pytest.mark.parametrize("process", ["vllm"], indirect=True)
@pytest.mark.parametrize("family", families_with_nets())
def test_delta_nets_from_export_and_after_updates_are_close(process: RemoteEngine, family: str, tmp_path: Path) -> None:
    fields = DELTA_NETS if family == "qwen3_5_text" else DELTA_NETS | EVERY_EXPERT
    model = exported_model(tmp_path, family, fields, {}, NET_CASES[family])
    engine = process.start(tmp_path / "exported", dtype="bfloat16")
    check_two_updates(engine, model, check_close)


@pytest.mark.parametrize("process", ["vllm"], indirect=True)
def test_vllm_kv_cache_too_small_names_key(process: RemoteEngine, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3", head_dim=32, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"rollout\.kv_cache_gib"):
        process.start(tmp_path, max_response_tokens=200, kv_cache_gib=1e-5)


def _record_ranks(engine: Any, pids: list[int]) -> None:
    """Add the process ids of ranks that SGLang starts from now on to a list that `_recorded` returns."""
    from mcore_rl.engines.sglang import processes

    def start_rank(*given: Any, start: Any = processes.start_rank) -> Any:
        rank = start(*given)
        pids.append(rank.pid)
        return rank

    processes.start_rank, processes.recorded = start_rank, pids  # type: ignore[attr-defined]


def _recorded(engine: Any) -> list[int]:
    from mcore_rl.engines.sglang import processes

    return processes.recorded  # type: ignore[attr-defined, no-any-return]


@WITH_SGLANG
@pytest.mark.parametrize("process", ["sglang"], indirect=True)
def test_sglang_rejected_model_reports_reason_and_leaves_no_files(process: RemoteEngine, tmp_path: Path) -> None:
    """Latent attention without YaRN fails on CPU with an assertion without message."""
    write_tiny_model(tmp_path, "deepseek_v3", hidden_size=128, **(DIVIDED_BY_TWO | LATENT))
    process.call(_record_ranks, [])
    with pytest.raises(ConfigError) as raised:
        process.start(tmp_path)
    assert str(raised.value) == "SGLang cannot run this: AssertionError: assert rope_scaling is not None"
    (pid,) = process.call(_recorded)
    assert not list(SHARED_MEMORY.glob(f"sglang_loads_mcore{pid}_*"))
