"""A run of a model with gated delta nets: every sync into vLLM is certified, and engine and trainer agree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.e2e.runs import ALPHABET, metrics, train
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.on_demand]

# vLLM's kernels for CPUs need heads of this size, and bfloat16.
SIZES = {"hidden_size": 128, "head_dim": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
KEYS = (
    "model.dtype=bfloat16", "model.float32_head=true", "model.float32_router=true",
    "weights.verify_every=1", "trainer.steps=2", "rollout.max_logp_gap=1",
)  # fmt: skip


def test_run_with_delta_nets_is_certified_and_close(task: Path, tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(task.parent / "model", model)  # the tokenizer
    fields = {"vocab_size": len(ALPHABET) + 3, "eos_token_id": 1, "num_hidden_layers": 2, **SIZES}
    write_tiny_model(model, "qwen3_next", std=0.06, **fields)
    with safe_open(model / "model.safetensors", "pt") as tensors:
        num_tensors = len(list(tensors.keys()))
    train(task, run, *KEYS, f"model.hf_path={model}")
    for row in [metrics(run)[step] for step in (1, 2)]:
        assert row["weights/tensors_verified"] == num_tensors
        assert row["rollout/logp_diff_mean"] < 0.05
