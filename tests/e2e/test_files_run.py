"""A run whose weights travel through files is the same run, and leaves no files behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.weights.transports.files.run_files import RECORD
from tests.e2e.runs import ENGINE, TrainProcess, assert_same_records, in_step, metrics, train
from tests.e2e.test_engine_loss import restarts, without_restarts

pytestmark = pytest.mark.slow

VERIFIED = "weights/tensors_verified"


def without_verification(run_dir: Path) -> dict[int, dict[str, float]]:
    return {step: {k: v for k, v in row.items() if k != VERIFIED} for step, row in metrics(run_dir).items()}


def through_files(weights: Path, *more: str) -> tuple[str, ...]:
    return ("weights.transport=files", f"weights.directory={weights}", *more)


def test_run_through_files_equals_one_through_memory(whole_run: Path, task: Path, tmp_path: Path) -> None:
    run_dir, weights = tmp_path / "run", tmp_path / "weights"
    train(task, run_dir, *through_files(weights, "weights.verify_every=1"))
    assert_same_records(run_dir, whole_run)
    assert without_verification(run_dir) == without_verification(whole_run)
    assert len({row[VERIFIED] for step, row in metrics(run_dir).items() if step}) == 1
    assert not list(weights.rglob("*"))
    assert not (run_dir / RECORD).exists()


@pytest.mark.on_demand  # test_engine_loss.py kills engines of runs through memory
def test_engine_lost_with_deltas_in_files_gets_a_whole_update(whole_run: Path, task: Path, tmp_path: Path) -> None:
    run_dir, weights = tmp_path / "run", tmp_path / "weights"
    with TrainProcess(task, run_dir, through_files(weights, "weights.delta=true")) as run:
        run.wait_until(in_step(run, 3, "updating"))
        run.kill_one(ENGINE)
        assert run.finish() == 0, run.text()[-4000:]
    assert restarts(run_dir) == 1
    rows = without_restarts(run_dir)
    for row in rows.values():
        assert row.pop("weights/delta_bytes") > 0
        assert 0 < row.pop("weights/delta_share") <= 1.01
    assert rows == without_restarts(whole_run)
    assert_same_records(run_dir, whole_run)
    assert not list(weights.rglob("*"))
