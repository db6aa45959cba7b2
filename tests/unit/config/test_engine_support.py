"""SGLang's environment is detected by its files, and only one version of it is supported."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.roles import EngineRole
from mcore_rl.config.rules.engine_support import (
    SGLANG_PYTHON,
    SGLANG_VERSION,
    cannot_run,
    check_sglang_model,
    missing_engine,
    sglang_version,
)
from mcore_rl.config.schema import Config
from mcore_rl.doctor.checks import check_sglang
from mcore_rl.errors import ConfigError
from tests.environments import make_environment

ROOT = Path(__file__).parents[3]


def test_sglang_version_of_interpreter_without_a_folder_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SGLANG_PYTHON, "python")
    assert sglang_version() is None


def _missing(config: Config) -> str | None:
    return missing_engine(config.algorithm, config.rollout, config.judge)


@pytest.mark.parametrize(
    ("version", "said"),
    [("0.5.20", "has SGLang 0.5.20, and SGLang"), (None, "has no SGLang, and SGLang"), (SGLANG_VERSION, None)],
)
def test_missing_engine_other_sglang_version_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, said: str | None
) -> None:
    python = make_environment(tmp_path, {} if version is None else {"sglang": version})
    monkeypatch.setenv(SGLANG_PYTHON, str(python))
    config = Config()
    assert _missing(config) is None
    config.rollout.engine = "sglang"
    problem = _missing(config)
    assert (problem is None) == (said is None)
    if problem is not None and said is not None:
        assert problem.startswith(
            f"rollout.engine=sglang: {python} {said} {SGLANG_VERSION} is needed; run `make sglang`"
        )
    assert sglang_version() == version
    assert check_sglang().ok == (version == SGLANG_VERSION)


def sglang_everywhere() -> Config:
    config = Config()
    config.rollout.engine = "sglang"
    config.judge.hf_path = "/models/judge"
    return config


@pytest.mark.parametrize(
    ("engine", "device", "replay", "runs"),
    [
        ("vllm", "cuda", "engine", False),
        ("vllm", "auto", "engine", False),  # a plan
        ("vllm", "cpu", "engine", True),
        ("sglang", "cuda", "engine", True),
        ("vllm", "cuda", "policy", True),
    ],
)
def test_cannot_run_experts_of_vllm_on_gpus(engine: str, device: str, replay: str, runs: bool) -> None:
    config = Config()
    config.rollout.engine, config.cluster.device, config.actor.moe.router_replay = engine, device, replay
    assert [problem.split(":")[0] for problem in cannot_run(config)] == ["actor.moe.router_replay=engine"] * (not runs)


DIVIDED = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192, "moe_intermediate_size": 64}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("tp", "changes", "said"),
    [
        (1, {"moe_intermediate_size": 24}, None),
        (2, {}, None),
        (2, {"moe_intermediate_size": 96}, r"^rollout\.tp=2: .* moe_intermediate_size .* of 64, .* model has 96"),
        (4, {}, r"^rollout\.tp=4: SGLang on CPU needs num_key_value_heads to be a multiple of 4, and the model has 2"),
        (1, {"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"^rollout\.engine=sglang cannot run a qwen3_moe"),
        (1, {"model_type": "qwen2_moe", "decoder_sparse_step": 2}, r"^rollout\.engine=sglang cannot run a qwen2_moe"),
        (1, {"shared_expert_intermediate_size": 64}, r"^rollout\.engine=sglang cannot run a shared expert with a gate"),
        (1, {"kv_lora_rank": 512}, r"^rollout\.engine=sglang cannot run latent attention .* without YaRN on"),
        (1, {"kv_lora_rank": 512, "rope_scaling": {"type": "linear"}}, "without YaRN"),
        (1, {"kv_lora_rank": 512, "rope_scaling": {"type": "yarn"}}, None),
        (2, {"kv_lora_rank": 512, "rope_parameters": YARN}, None),
    ],
)
def test_check_sglang_model_silently_changed_model_is_rejected(
    tp: int, changes: dict[str, Any], said: str | None
) -> None:
    config = Config()
    config.rollout.engine, config.rollout.tp = "sglang", tp
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_sglang_model(EngineRole.rollout(config.rollout, config.model), DIVIDED | changes, cuda=False)
    config.rollout.engine = "vllm"
    check_sglang_model(EngineRole.rollout(config.rollout, config.model), DIVIDED | changes, cuda=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe_intermediate_size": 24, "num_experts": 8}, None),
        ({"n_shared_experts": 1, "n_routed_experts": 8}, None),
        ({"n_shared_experts": 1, "moe_intermediate_size": 24}, "needs moe_intermediate_size to be a multiple of 64"),
        ({"num_experts": 7}, r"^rollout\.tp=2: SGLang on CPU needs num_experts to be a multiple of 2, .* model has 7"),
    ],
)
def test_check_sglang_model_whole_experts_are_not_divided(changes: dict[str, Any], said: str | None) -> None:
    config = Config()
    config.rollout.engine, config.rollout.tp, config.rollout.expert_parallel = "sglang", 2, True
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_sglang_model(EngineRole.rollout(config.rollout, config.model), DIVIDED | changes, cuda=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 8, "intermediate_size": 40}, None),  # two key-value heads: replicated
        ({"kv_lora_rank": 512}, None),
        ({"shared_expert_intermediate_size": 64}, None),
        ({"num_experts": 8}, None),
        ({"num_experts": 6}, r"^rollout\.tp=4: SGLang needs num_experts to be a multiple of 4, and the model has 6"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"^rollout\.engine=sglang cannot run a qwen3_moe"),
    ],
)
def test_check_sglang_model_on_gpus_pads_nothing(changes: dict[str, Any], said: str | None) -> None:
    config = Config()
    config.rollout.engine, config.rollout.tp, config.rollout.expert_parallel = "sglang", 4, True
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_sglang_model(EngineRole.rollout(config.rollout, config.model), DIVIDED | changes, cuda=True)


@pytest.mark.parametrize(
    ("family", "cuda", "said"),
    [
        ("deepseek_v3", False, None),
        ("glm4_moe", True, None),
        (
            "glm4_moe",
            False,
            "SGLang on CPU divides the shared experts of glm4_moe among all ranks; set it to",
        ),
        ("mixtral", True, "=true: SGLang divides the attention of mixtral among all ranks; set it to false"),
    ],
)
def test_check_sglang_model_attention_dp_of_a_family(family: str, cuda: bool, said: str | None) -> None:
    config = Config()
    config.rollout.engine, config.rollout.tp, config.rollout.expert_parallel = "sglang", 2, True
    role = EngineRole.rollout(config.rollout, config.model)
    model = DIVIDED | {"model_type": family, "n_shared_experts": 1, "n_routed_experts": 8}
    check_sglang_model(role, model, cuda=cuda)
    config.rollout.data_parallel_attention = True
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_sglang_model(role, model, cuda=cuda)


def test_check_sglang_model_needs_memory_beside_its_fraction() -> None:
    config = Config()
    config.rollout.engine, config.rollout.gpu_memory_fraction = "sglang", 1.0
    role = EngineRole.rollout(config.rollout, config.model)
    check_sglang_model(role, DIVIDED, cuda=False)
    with pytest.raises(ConfigError, match=r"^rollout\.gpu_memory_fraction=1 leaves SGLang no memory for activations"):
        check_sglang_model(role, DIVIDED, cuda=True)


def test_missing_engine_of_the_judge_names_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SGLANG_PYTHON, "nowhere/python")
    config = sglang_everywhere()
    config.rollout.engine, config.judge.engine = "vllm", "sglang"
    assert (_missing(config) or "").startswith("judge.engine=sglang: nowhere/python is not there")
    config.judge.engine = "vllm"
    assert _missing(config) is None


def test_sglang_version_equals_the_locked_version() -> None:
    assert f" sglang=={SGLANG_VERSION} " in (ROOT / "scripts" / "setup_sglang.sh").read_text()
