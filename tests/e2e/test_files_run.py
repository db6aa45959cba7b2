"""A run whose weights travel through files is the same run, and leaves no files behind."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mcore_rl.weights.transports.files.run_files import RECORD
from tests.e2e.runs import ENGINE, SECONDS_TO_END, TrainProcess, assert_same_records, in_step, metrics, train
from tests.e2e.test_engine_loss import restarts, without_restarts

pytestmark = pytest.mark.slow

VERIFIED = "weights/tensors_verified"


def without_verification(run_dir: Path) -> dict[int, dict[str, float]]:
    return {step: {k: v for k, v in row.items() if k != VERIFIED} for step, row in metrics(run_dir).items()}


def through_files(weights: Path, *more: str) -> tuple[str, ...]:
    return ("weights.transport=files", f"weights.directory={weights}", *more)


@pytest.mark.on_demand  # a run of test_run.py certifies every sync through files
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


def delete_the_directory(run: TrainProcess, weights: Path) -> None:
    shutil.rmtree(weights)


def truncate_a_file(run: TrainProcess, weights: Path) -> None:
    change_a_file(run, weights, lambda file: file.write_bytes(file.read_bytes()[:-1]))


def stall_a_file(run: TrainProcess, weights: Path) -> None:
    """Replace a file by a pipe that nobody writes to: reading it never ends, as with a server that hangs."""

    def stall(file: Path) -> None:
        file.unlink()
        os.mkfifo(file)

    change_a_file(run, weights, stall)


def change_a_file(run: TrainProcess, weights: Path, change: Callable[[Path], object]) -> None:
    """Change a file of the next update while the engine is stopped, before it reads the file."""
    engine: psutil.Process
    (engine,) = run.processes(ENGINE)
    engine.suspend()
    before = set(weights.rglob("*.weights.*"))
    complete = set(weights.rglob("complete/*.json"))
    run.wait_until(lambda: len(set(weights.rglob("complete/*.json")) - complete) == 2)
    file = max(set(weights.rglob("*.weights.*")) - before, key=lambda path: path.stat().st_size)
    change(file)
    engine.resume()


FAULTS = {
    delete_the_directory: r"weights\.directory: \S+: FileNotFoundError: .*\(trainer rank \d\)",
    truncate_a_file: r"\S+\.weights\.\d+ has \d+ bytes instead of \d+ \(rollout engine 0\)",
    stall_a_file: r"\S+\.weights\.\d+: no answer within 10 s .*\(rollout engine 0\)",
}


@pytest.mark.on_demand  # tests/unit/weights/test_files.py has the errors of a process
@pytest.mark.parametrize(
    ("fault", "delta"),
    [(delete_the_directory, "true"), (truncate_a_file, "false"), (truncate_a_file, "true"), (stall_a_file, "false")],
)
def test_fault_of_files_ends_the_run_in_time_and_names_the_process(
    fault: Callable[[TrainProcess, Path], None], delta: str, task: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    overrides = through_files(weights, f"weights.delta={delta}", "cluster.collective_timeout_seconds=10")
    with TrainProcess(task, tmp_path / "run", overrides) as run:
        run.wait_until(in_step(run, 2, "updating"))
        fault(run, weights)
        assert run.finish(SECONDS_TO_END) == 1, run.text()[-4000:]
        errors = [line for line in run.text().splitlines() if line.startswith("error:")]
        assert re.fullmatch(rf"error: {FAULTS[fault]}.*", "\n".join(errors))
        assert "Traceback" not in run.text()
        assert not run.left_after(10)
