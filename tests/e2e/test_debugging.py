"""Commands that examine a part of a run, on a tiny task with the real engine."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from mcore_rl.cli import main
from tests.e2e.runs import ENGINE, TrainProcess, metrics, no_segment_is_left, records_of


def test_dry_run_of_a_complete_task_leaves_no_trace(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(task), f"run.dir={tmp_path / 'run'}", "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == []
    out = capsys.readouterr().out
    assert all(text in out for text in ("trainer ranks 0-1", "rollout engine 0", "Fullest rank", "dry run: nothing"))


class DebugRollout(TrainProcess):
    """An `mcore-rl debug rollout` process."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "mcore_rl.cli", "debug", "rollout", str(self.config), f"run.dir={self.run_dir}"]


def test_debug_rollout_generates_the_first_batch_of_a_run(task: Path, whole_run: Path, tmp_path: Path) -> None:
    with DebugRollout(task, tmp_path / "run") as run:
        run.wait_until(lambda: run.processes(ENGINE))
        # The run has two trainer ranks; this command starts none.
        assert not run.processes("ray::TrainerProcess")
        assert run.finish() == 0, run.text()[-6000:]
        assert not run.left_after(30)
    assert "32 responses in 8 groups, 32 shown" in run.text()
    records = records_of(tmp_path / "run" / "debug_rollout", "step_1")
    # Weights that the engine reads from the checkpoint are those that trainer ranks send before the first step.
    assert records == records_of(whole_run, "step_1")[:32]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["debug_rollout"]
    assert no_segment_is_left()


# `train` would accept it, since it grades the trial with the ground truth.
STRICT = """
def strict(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if solution_str != ground_truth:
        raise ValueError("no\\x1b[2Jway")
    return 1.0
"""


def test_debug_rollout_shows_responses_that_cannot_be_graded(task: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(STRICT)
    overrides = (f"reward.function={tmp_path / 'reward.py'}:strict", "trainer.prompts_per_step=2")
    with DebugRollout(task, tmp_path / "run", (*overrides, "trainer.prompts_per_update=2")) as run:
        assert run.finish() == 1, run.text()[-6000:]
        assert not run.left_after(30)
    lines = run.text().splitlines()
    assert any(line.startswith("error of 8 responses: ") and "noU+001B[2Jway" in line for line in lines)
    assert sum(line.startswith("    response: ") for line in lines) == 8
    assert "8 of 8 responses of step 1, which reaches reward.max_error_fraction" in lines[-1]


class DebugTrain(TrainProcess):
    """An `mcore-rl debug train` process for step 3."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "mcore_rl.cli", "debug", "train", str(self.run_dir), "--step", "3"]


def contents(run_dir: Path) -> dict[str, bytes]:
    """Return the files of a run, without those of `debug train`."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and "debug_train" not in path.parts)
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}


def test_debug_train_repeats_a_step_bit_for_bit(task: Path, whole_run: Path, tmp_path: Path) -> None:
    """The step has two updates on two data-parallel ranks, from the checkpoint of step 2."""
    run_dir = tmp_path / "moved"
    shutil.copytree(whole_run, run_dir)
    assert sorted(path.name for path in (run_dir / "trajectories").iterdir()) == ["step_2", "step_3", "step_4"]
    before = contents(run_dir)
    with DebugTrain(task, run_dir) as repetition:
        assert repetition.finish() == 0, repetition.text()[-6000:]
        assert not repetition.left_after(30)
    assert contents(run_dir) == before
    written = json.loads((run_dir / "debug_train" / "step_3.json").read_text())
    found, expected = written["metrics"], metrics(whole_run)[3]
    updated = {name for name in expected if name.startswith("actor/")}
    assert {"actor/loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl", "actor/clip_fraction"} <= updated
    assert {name: found[name]["repeated"] for name in updated} == {name: expected[name] for name in updated}
    assert all(value["recorded"] == value["repeated"] for value in found.values())
    assert f"all {len(found)} metrics are equal to the recorded ones" in repetition.text()
