"""A start keeps earlier configurations and reports the changed keys."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_rl.config import Config, load_config
from mcore_rl.config.run_configs import replace_config


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(
        "run: {dir: run}\nmodel: {hf_path: m}\ndata: {train: a.jsonl}\n"
        "actor: {optimizer: {lr: 1e-3}}\ntrainer: {steps: 40}\n"
    )
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


def test_replace_config_equal_configuration_changes_nothing(base: Path, run_dir: Path) -> None:
    for _ in range(2):
        assert replace_config(load_config(str(base)), run_dir) == []
        assert files(run_dir) == ["config.yaml"]


@pytest.mark.slow
def test_replace_config_keeps_old_files_and_names_changed_keys(base: Path, run_dir: Path) -> None:
    def start(*overrides: str) -> list[str]:
        return replace_config(load_config(str(base), overrides), run_dir)

    start()
    first = (run_dir / "config.yaml").read_text()
    assert start("trainer.steps=60", "actor.optimizer.lr=2e-3", "data.val=v.jsonl") == [
        "actor.optimizer.lr: 0.001 -> 0.002",
        "data.val: null -> ['v.jsonl']",
        "trainer.steps: 40 -> 60",
    ]
    for number in range(2, 9):  # earlier starts
        shutil.copy2(run_dir / "config.1.yaml", run_dir / f"config.{number}.yaml")
    for steps in range(61, 64):
        assert start(f"trainer.steps={steps}")[-1] == f"trainer.steps: {steps - 1} -> {steps}"
    assert len(files(run_dir)) == 12
    assert (run_dir / "config.1.yaml").read_text() == first
    assert {path.stat().st_mode & 0o777 for path in run_dir.iterdir()} == {0o600}
    assert load_config(str(run_dir / "config.11.yaml")).trainer.steps == 62
    assert load_config(str(run_dir / "config.yaml")).trainer.steps == 63


def test_replace_config_old_single_path_is_no_change(base: Path, run_dir: Path) -> None:
    replace_config(load_config(str(base), ["data.val=v.jsonl"]), run_dir)
    written = (run_dir / "config.yaml").read_text()
    assert "train:\n  - a.jsonl\n  val:\n  - v.jsonl\n" in written
    older = written.replace("train:\n  - a.jsonl", "train: a.jsonl").replace("val:\n  - v.jsonl", "val: v.jsonl")
    (run_dir / "config.yaml").write_text(older)
    assert replace_config(load_config(str(base), ["data.val=[w.jsonl]"]), run_dir) == [
        "data.val: ['v.jsonl'] -> ['w.jsonl']"
    ]


def test_replace_config_place_of_the_run_is_not_reported(base: Path, run_dir: Path) -> None:
    replace_config(load_config(str(base)), run_dir)
    changed = [
        "run.dir=elsewhere",
        "slurm.environment={TOKEN: x}",
        "cluster.address=here:1",
        "plan.mfu_update=0.5",
    ]
    assert replace_config(load_config(str(base), changed), run_dir) == []
    assert files(run_dir) == ["config.1.yaml", "config.yaml"]


def test_replace_config_new_key_counts_as_default(base: Path, run_dir: Path) -> None:
    replace_config(load_config(str(base)), run_dir)
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(text.replace("  keep_best: 1\n", "").replace("  keep_last: 2\n", ""))
    default = Config().checkpoint
    assert replace_config(load_config(str(base), ["checkpoint.keep_best=3"]), run_dir) == [
        f"checkpoint.keep_best: {default.keep_best} -> 3"
    ]


def test_replace_config_interrupted_start_keeps_no_duplicate(base: Path, run_dir: Path) -> None:
    replace_config(load_config(str(base)), run_dir)
    (run_dir / "config.1.yaml").write_text((run_dir / "config.yaml").read_text())
    replace_config(load_config(str(base), ["trainer.steps=60"]), run_dir)
    assert files(run_dir) == ["config.1.yaml", "config.yaml"]
