"""Commands that examine a part of a run, on a tiny task with the real engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mcore_rl.cli import main
from tests.e2e.runs import ENGINE, TrainProcess, no_segment_is_left, records_of


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
