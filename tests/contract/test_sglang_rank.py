"""Weight updates inside one SGLang rank: derived weights, order of record and connect, formats that are rejected."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.settings import EngineSettings
from mcore_rl.engines.sglang.arguments import server_arguments
from mcore_rl.engines.sglang.settings import RankSettings
from tests.contract.engines import SGLANG, WITH_SGLANG
from tests.contract.hf_trainer import hf_tensors
from tests.tiny_models import YARN, tiny_model

ROOT = Path(__file__).parents[2]
LAYERS = 3
pytestmark = WITH_SGLANG


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of sglang_rank.py with a DeepSeek-V3 whose shared expert is behind the routed ones, as on GPUs."""
    directory = tmp_path_factory.mktemp("rank")
    model = tiny_model("deepseek_v3", num_hidden_layers=LAYERS, rope_parameters=YARN)
    model.save_pretrained(directory / "model")
    save_file({name: tensor.contiguous() for name, tensor in hf_tensors(model).items()}, directory / "tensors")
    rollout = RolloutConfig(engine="sglang", max_prompt_tokens=32, max_response_tokens=32, kv_cache_gib=0.03)
    settings = EngineSettings(
        directory / "model", rollout, dtype="float32", seed=1, timeout_seconds=60, load_weights=False
    )
    arguments = server_arguments(settings, "cpu") | {"enforce_shared_experts_fusion": True}
    rank = RankSettings(arguments, 1, 1 << 24, init_method=f"file://{directory}/meeting")
    (directory / "settings").write_bytes(pickle.dumps(rank))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [SGLANG, ROOT / "tests/contract/sglang_rank.py", directory / "settings", directory / "tensors"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_connect_with_released_weights_accesses_no_parameter(results: dict[str, Any]) -> None:
    assert results["connect"] > 50


def test_update_without_derived_weights_differs_in_latent_projections(results: dict[str, Any]) -> None:
    assert results["update"] == []
    names = [f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in range(LAYERS)]
    assert results["without derived weights"] == names
    assert results["next update"] == []


def test_held_weights_fused_shared_expert_has_its_name(results: dict[str, Any]) -> None:
    assert results["experts"] == [9] * (LAYERS - 1)  # 8 routed experts and the shared one
    assert results["update"] == []


def test_held_weights_with_up_before_gate_are_exact(results: dict[str, Any]) -> None:
    assert results["up before gate"] == {"differing": [], "up first": True}


def test_model_that_sglang_cannot_update_is_rejected(results: dict[str, Any]) -> None:
    reasons = {
        "use_triton_kernels": "experts of moe_runner_backend=triton_kernels are transposed",
        "w13_swiglu_interleaved": "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED interleaves the rows of experts; unset it",
        **dict.fromkeys(
            ("enable_eplb", "ep_num_redundant_experts"),
            "enable_eplb and ep_num_redundant_experts give experts other numbers than the model's",
        ),
        "derived": "a cached split",
    }
    found = results["refusals"]
    assert found.pop("nothing") == ""
    assert found == {name: f"SGLang cannot update the weights of this model: {text}" for name, text in reasons.items()}
