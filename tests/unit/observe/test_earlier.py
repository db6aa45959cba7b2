"""Records of earlier starts are moved aside completely."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_rl.observe.metrics import MetricsLog, read_metrics, set_aside

RESPONSES = ("step_1.jsonl", "step_2.jsonl", "step_12.jsonl", "val_step_2.jsonl")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Run directory with records of steps 1, 2 and 12."""
    for step in (1, 2, 12):
        MetricsLog(tmp_path).append(step, {"reward/mean": step / 4})
    for name in RESPONSES:
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        (tmp_path / "rollouts" / name).write_text(name)
    (tmp_path / "tokens").mkdir()
    for step in (1, 2):
        (tmp_path / "tokens" / f"step_{step}.jsonl").write_text(f"tokens of step {step}")
    (tmp_path / "timeline.json").write_text("[]")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events").write_text("")
    return tmp_path


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def steps(directory: Path) -> list[int]:
    return [record["step"] for record in read_metrics(directory / "metrics.jsonl")]


def test_set_aside_on_resume_moves_only_later_steps(run_dir: Path) -> None:
    before = {name: (run_dir / name).read_text() for name in files(run_dir)}
    assert set_aside(run_dir, 1) == run_dir / "earlier" / "1"
    moved = {"rollouts/step_2.jsonl", "rollouts/step_12.jsonl", "rollouts/val_step_2.jsonl", "tokens/step_2.jsonl"}
    assert files(run_dir / "earlier" / "1") == {*moved, "metrics.jsonl"}
    assert {(run_dir / "earlier" / "1" / name).read_text() for name in moved} == {before[name] for name in moved}
    assert files(run_dir) - {f"earlier/1/{name}" for name in (*moved, "metrics.jsonl")} == before.keys() - moved
    assert (steps(run_dir), steps(run_dir / "earlier" / "1")) == ([1], [2, 12])


@pytest.mark.parametrize(("step", "left"), [(2, ["step_1", "step_2"]), (-1, [])])
def test_set_aside_removes_trajectories_that_metrics_no_longer_match(run_dir: Path, step: int, left: list[str]) -> None:
    for kept in (1, 2, 12):
        (run_dir / "trajectories" / f"step_{kept}").mkdir(parents=True)
        (run_dir / "trajectories" / f"step_{kept}" / "rank_0.safetensors").write_text("")
    set_aside(run_dir, step)
    assert sorted(path.name for path in (run_dir / "trajectories").iterdir()) == left
    assert not [name for name in files(run_dir) if name.startswith("earlier/1/trajectories")]


def test_set_aside_from_start_keeps_only_config_and_checkpoints(run_dir: Path) -> None:
    before = files(run_dir)
    for name in ("config.yaml", "checkpoints/step_0/complete.json"):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text("")
    target = set_aside(run_dir, -1)
    assert target is not None
    assert files(target) == before
    assert steps(target) == [1, 2, 12]
    assert steps(run_dir) == []
    assert {"config.yaml", "checkpoints/step_0/complete.json"} < files(run_dir)


def test_set_aside_creates_folder_only_for_repeated_steps(run_dir: Path) -> None:
    assert set_aside(run_dir, 12) is None
    assert not (run_dir / "earlier").exists()
    for number in range(1, 12):
        assert set_aside(run_dir, 1) == run_dir / "earlier" / str(number)
        MetricsLog(run_dir).append(2, {})


def test_set_aside_after_interruption_loses_nothing(run_dir: Path) -> None:
    before = files(run_dir)
    first = run_dir / "earlier" / "1"
    (first / "rollouts").mkdir(parents=True)
    for name in ("timeline.json", "tensorboard", "rollouts/step_2.jsonl"):
        os.rename(run_dir / name, first / name)
    second = set_aside(run_dir, -1)
    assert second == run_dir / "earlier" / "2"
    assert files(first) | files(second) == before
    assert steps(second) == [1, 2, 12]
