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


# `train` would accept it, since its trial on an empty response raises no error.
STRICT = """
import sys

sys.path.insert(0, {task!r})
from reward import digits

def strict(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if len(solution_str) % 4 == 3:
        raise ValueError("no\\x1b[2Jway")
    return digits(data_source, solution_str, ground_truth, extra_info)
"""


def test_debug_rollout_generates_the_first_batch_of_a_run(task: Path, whole_run: Path, tmp_path: Path) -> None:
    """Some responses cannot be graded; they are shown, too, and end the command with an error."""
    (tmp_path / "strict.py").write_text(STRICT.format(task=str(task.parent)))
    overrides = (f"reward.function={tmp_path / 'strict.py'}:strict", "reward.max_error_fraction=0.01")
    with DebugRollout(task, tmp_path / "run", overrides) as run:
        run.wait_until(lambda: run.processes(ENGINE))
        # The run has two trainer ranks; this command starts none.
        assert not run.processes("ray::TrainerProcess")
        assert run.finish() == 1, run.text()[-6000:]
        assert not run.left_after(30)
    lines = run.text().splitlines()
    records = records_of(tmp_path / "run" / "debug_rollout", "step_1")
    ungraded = [record for record in records if len(record["response"]) % 4 == 3]
    assert 0 < len(ungraded) < 32
    assert "32 responses in 8 groups, 32 shown" in run.text()
    assert sum(line.startswith("    response: ") for line in lines) == 32
    assert any(line.startswith(f"error of {len(ungraded)} responses: ") and "noU+001B[2Jway" in line for line in lines)
    assert f"{len(ungraded)} of 32 responses of step 1, which reaches reward.max_error_fraction" in lines[-1]
    # Weights that the engine reads from the checkpoint are those that trainer ranks send before the first step.
    pairs = list(zip(records, records_of(whole_run, "step_1")[:32], strict=True))
    assert [ours["response"] for ours, _ in pairs] == [expected["response"] for _, expected in pairs]
    assert all(ours == expected for ours, expected in pairs if ours not in ungraded)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["debug_rollout"]
    assert no_segment_is_left()


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
