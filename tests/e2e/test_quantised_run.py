"""A run with FP8 rollouts: every sync is certified, the correction is on, and the difference stays within its limit."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.e2e.runs import ALPHABET, metrics, train
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 128}
KEYS = ("rollout.quantization=fp8", "model.dtype=bfloat16", "weights.verify_every=1", "trainer.steps=2")


@pytest.mark.on_demand
def test_run_with_fp8_rollouts_is_certified_and_corrected(task: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(task.parent / "model", model)  # the tokenizer
    write_tiny_model(model, "qwen3_moe", std=0.06, vocab_size=len(ALPHABET) + 3, eos_token_id=1, **SIZES)
    log = train(task, tmp_path / "run", *KEYS, f"model.hf_path={model}")
    found = re.search(r"trainer differ by ([0-9.e-]+) nats.*the limit is 0\.2", log)
    assert found
    # Rounding to 3 bits of mantissa: a comparison of equal weights in bfloat16 gives 0.002.
    assert 0.005 < float(found[1]) < 0.2
    with safe_open(model / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
    scales = [name for name in names if name.endswith("_proj.weight")]
    for row in [metrics(tmp_path / "run")[step] for step in (1, 2)]:
        assert row["weights/tensors_verified"] == len(names) + len(scales)
        assert 0.5 < row["correction/weight_mean"] < 1.5
        assert 0 < row["correction/effective_sample_fraction"] <= 1
        assert 0 < row["rollout/logp_diff_mean"] < 0.2
