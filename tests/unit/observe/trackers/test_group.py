"""Trackers of a run: facts, ids over resumes, and their use by the journal."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from mcore_rl.config.observe import ObserveConfig
from mcore_rl.errors import DataError
from mcore_rl.observe.journal import RunJournal
from mcore_rl.observe.metrics import set_aside
from mcore_rl.observe.trackers import group
from mcore_rl.observe.trackers.registry import TrackerKind
from mcore_rl.observe.trackers.run_facts import code_revision, run_facts
from mcore_rl.observe.trackers.run_ids import RunIds
from mcore_rl.types import Total
from tests.unit.observe.trackers.recorded import FakeTracker

CONFIG = "actor: {optimizer: {lr: 1.0e-06}}\nslurm: {environment: {TOKEN: hunter2}}\n"


def test_run_ids_keep_ids_of_earlier_starts(tmp_path: Path) -> None:
    made = RunIds(tmp_path / "trackers").get_or_make("wandb", lambda: "first")
    again = RunIds(tmp_path / "trackers")
    again.get_or_make("mlflow", lambda: "other")
    assert (made, again.get_or_make("wandb", lambda: "second"), again.get("mlflow")) == ("first", "first", "other")
    assert again.get("swanlab") is None


def test_run_ids_invalid_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("{")
    with pytest.raises(DataError, match=r"ids.json is not valid JSON.*remove it"):
        RunIds(tmp_path).get("wandb")


def test_run_facts_have_config_without_secrets_and_versions(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    facts = run_facts(tmp_path, ObserveConfig(project="p"), 0)
    assert (facts.project, facts.name) == ("p", tmp_path.name)
    assert facts.config == {"actor.optimizer.lr": 1e-6, "slurm.environment": ["TOKEN"]}
    assert {"mcore-rl", "python"} <= set(facts.versions)
    assert "hunter2" not in str(facts)


def test_code_revision_is_of_the_checkout_with_its_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "code.py").write_text("1")
    assert code_revision(tmp_path) is None  # no commit
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    assert code_revision(tmp_path) == commit
    (tmp_path / "code.py").write_text("2")
    assert code_revision(tmp_path) == f"{commit}-dirty"
    # An environment inside another project's checkout.
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "other.py").write_text("1")
    assert code_revision(tmp_path / "venv") is None


def test_start_from_the_beginning_moves_ids_and_files(tmp_path: Path) -> None:
    RunIds(tmp_path / "trackers").get_or_make("wandb", lambda: "first")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n")
    assert set_aside(tmp_path, 0) is None  # resumed
    assert RunIds(tmp_path / "trackers").get("wandb") == "first"
    moved = set_aside(tmp_path, -1)
    assert moved is not None
    assert (moved / "trackers" / "ids.json").exists()
    assert RunIds(tmp_path / "trackers").get("wandb") is None


def journal_with(tracker: FakeTracker, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> RunJournal:
    kind = TrackerKind(("fake",), "fake", "1", lambda facts: tracker)
    monkeypatch.setattr(group, "TRACKERS", {"wandb": kind})
    journal = RunJournal(run_dir, 3, list, [], observe=ObserveConfig(trackers=["wandb"]))
    journal.resume_after(-1)
    return journal


def test_journal_failing_tracker_is_noted_and_steps_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = FakeTracker(fails_at=(1, 2))
    journal = journal_with(tracker, tmp_path, monkeypatch)
    for step in range(3):
        journal.record({"reward/mean": Total(0.5)})
        journal.finish_step(step)
    journal.close(failed=True)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert tracker.closed == [True]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tracker")]
    assert lines[-1] == "tracker wandb: 1 entries sent, 2 failed; first error: RuntimeError: the server is gone"
    assert len(lines) <= 2


def test_journal_values_that_are_not_finite_reach_no_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Recording(FakeTracker):
        def append(self, step: int, metrics: object, responses: object) -> None:
            seen.append(metrics)

    journal = journal_with(Recording(), tmp_path, monkeypatch)
    journal.record({"a": Total(1.0), "b": Total(float("nan")), "c": Total(float("inf"))})
    journal.finish_step(1)
    journal.close()
    assert seen == [{"a": 1.0, "time/step": 0.0}]
