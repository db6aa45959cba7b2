"""Runs with INT4 rollouts: every sync is certified, and quantisation-aware training removes the rounding from the
difference between engine and trainer."""

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
KEYS = (
    "rollout.quantization=int4", "rollout.quantization_group=32", "model.dtype=bfloat16", "weights.verify_every=1",
    "trainer.steps=2", "rollout.max_logp_gap=1",
)  # fmt: skip


FSDP2_FILES = (
    "actor.strategy=fsdp2", "actor.parallel.ep=1", "actor.quantization_aware=32",
    "weights.transport=files", "weights.delta=true",
)  # fmt: skip


def expert_model(task: Path, tmp_path: Path) -> tuple[Path, int]:
    """Write a model with experts. Returns its directory, and the number of tensors that engines hold in INT4."""
    model = tmp_path / "model"
    shutil.copytree(task.parent / "model", model)  # the tokenizer
    write_tiny_model(model, "qwen3_moe", std=0.06, vocab_size=len(ALPHABET) + 3, eos_token_id=1, **SIZES)
    with safe_open(model / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
    return model, len(names) + len([name for name in names if ".experts." in name])


def certified_gap(log: str, run: Path, num_tensors: int) -> float:
    """Check the metrics of a run. Returns the difference between engine and trainer in nats before its first step."""
    found = re.search(r"trainer differ by ([0-9.e-]+) nats", log)
    assert found
    for row in [metrics(run)[step] for step in (1, 2)]:
        assert row["weights/tensors_verified"] == num_tensors
        assert 0.5 < row["correction/weight_mean"] < 1.5
    return float(found[1])


@pytest.mark.on_demand
def test_run_with_int4_rollouts_is_certified_and_trained_with_rounding(task: Path, tmp_path: Path) -> None:
    model, num_tensors = expert_model(task, tmp_path)
    gaps = {}
    for group in (0, 32):
        run = tmp_path / f"run{group}"
        log = train(task, run, *KEYS, f"model.hf_path={model}", f"actor.quantization_aware={group}")
        gaps[group] = certified_gap(log, run, num_tensors)
    print(f"gaps in nats: {gaps[0]} without and {gaps[32]} with quantisation-aware training")
    # bfloat16 arithmetic remains: a comparison of equal weights gives 0.002.
    assert gaps[32] < 0.02 < gaps[0]


@pytest.mark.on_demand
def test_run_of_transformers_model_through_files_is_trained_with_rounding(task: Path, tmp_path: Path) -> None:
    model, num_tensors = expert_model(task, tmp_path)
    run, files = tmp_path / "run", tmp_path / "files"
    log = train(task, run, *KEYS, *FSDP2_FILES, f"model.hf_path={model}", f"weights.directory={files}")
    gap = certified_gap(log, run, num_tensors)
    print(f"gap in nats: {gap}")
    assert gap < 0.02
