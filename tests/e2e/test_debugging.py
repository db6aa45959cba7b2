"""Commands that examine a part of a run, on a tiny task with the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.cli import main


def test_dry_run_of_a_complete_task_leaves_no_trace(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(task), f"run.dir={tmp_path / 'run'}", "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == []
    out = capsys.readouterr().out
    assert all(text in out for text in ("trainer ranks 0-1", "rollout engine 0", "Fullest rank", "dry run: nothing"))
