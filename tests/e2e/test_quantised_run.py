"""A run with FP8 rollouts: every sync is certified, the correction is on, and the difference stays within its limit."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.e2e.runs import ALPHABET, ENGINE, TrainProcess, assert_same_records, in_step, metrics, train
from tests.e2e.test_engine_loss import restarts, without_restarts
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 128}
KEYS = ("rollout.quantization=fp8", "model.dtype=bfloat16", "weights.verify_every=1", "trainer.steps=2")


@pytest.fixture(scope="module")
def quantised_task(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A run with FP8 rollouts: its model's directory, its directory, and its log."""
    directory = tmp_path_factory.mktemp("quantised")
    model, run_dir = directory / "model", directory / "run"
    shutil.copytree(task.parent / "model", model)  # the tokenizer
    write_tiny_model(model, "qwen3_moe", std=0.06, vocab_size=len(ALPHABET) + 3, eos_token_id=1, **SIZES)
    return model, run_dir, train(task, run_dir, *KEYS, f"model.hf_path={model}")


@pytest.mark.on_demand
def test_run_with_fp8_rollouts_is_certified_and_corrected(quantised_task: tuple[Path, Path, str]) -> None:
    model, run_dir, log = quantised_task
    found = re.search(r"trainer differ by ([0-9.e-]+) nats.*the limit is 0\.2", log)
    assert found
    # Rounding to 3 bits of mantissa: a comparison of equal weights in bfloat16 gives 0.002.
    assert 0.005 < float(found[1]) < 0.2
    with safe_open(model / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
    scales = [name for name in names if name.endswith("_proj.weight")]
    for row in [metrics(run_dir)[step] for step in (1, 2)]:
        assert row["weights/tensors_verified"] == len(names) + len(scales)
        assert 0.5 < row["correction/weight_mean"] < 1.5
        assert 0 < row["correction/effective_sample_fraction"] <= 1
        assert 0 < row["rollout/logp_diff_mean"] < 0.2


@pytest.mark.on_demand
def test_run_with_fp8_deltas_in_files_and_a_lost_engine_is_the_same_run(
    quantised_task: tuple[Path, Path, str], task: Path, tmp_path: Path
) -> None:
    model, other, _ = quantised_task
    run_dir, weights = tmp_path / "run", tmp_path / "weights"
    through_files = ("weights.transport=files", f"weights.directory={weights}", "weights.delta=true")
    with TrainProcess(task, run_dir, (*KEYS, f"model.hf_path={model}", *through_files)) as run:
        run.wait_until(in_step(run, 1, "updating"))
        run.kill_one(ENGINE)
        assert run.finish() == 0, run.text()[-4000:]
    assert restarts(run_dir) == 1
    rows = without_restarts(run_dir)
    for step, row in rows.items():
        assert row.pop("weights/delta_bytes") > 0, step
        assert 0 < row.pop("weights/delta_share") <= 1.01
    assert rows == without_restarts(other)
    assert_same_records(run_dir, other)
    assert not list(weights.rglob("*"))
