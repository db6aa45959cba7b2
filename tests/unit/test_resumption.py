"""Command that resumes a run, and the description of its state."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.cli import _parse
from mcore_rl.config import load_config
from mcore_rl.config.reading.overrides import split_words
from mcore_rl.resumption import resume_advice, resume_hint
from mcore_rl.trainer.checkpoints import Checkpoints
from mcore_rl.types import SavedState

SAVED: Any = SimpleNamespace(done=lambda: True, result=lambda: SavedState((), {}))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "my base.yaml", tmp_path / "model.yaml"]
    paths[0].write_text("data: {train: t.jsonl}\n")
    paths[1].write_text("model: {hf_path: m}\n")
    return [str(path) for path in paths]


def command_of(advice: str) -> list[str]:
    return shlex.split(advice.removeprefix("resume with: mcore-rl "))


@pytest.mark.parametrize("given", [[], ["run.dir=runs/{date} #1"], ["run.dir=runs/it's $x"]])
def test_resume_advice_loads_the_same_configuration(
    files: list[str], given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("x", "y")
    overrides = ["trainer.steps=7", *given, r"judge.score_pattern=Score: (\d+)"]
    config = load_config(files, overrides)
    options = _parse(command_of(resume_advice(config, files, overrides)))
    again = load_config(*split_words([options.config, *options.words]))
    assert again == config


def test_resume_advice_leaves_out_keys_of_the_job_script(files: list[str]) -> None:
    private = ["slurm.environment.A=private", "slurm={environment: {B: private}}"]
    overrides = [*private, "trainer.steps=7", "run.dir=r"]
    advice = resume_advice(load_config(files, overrides), files, overrides)
    assert command_of(advice) == ["train", *files, "trainer.steps=7", "run.dir=r"]


def test_resume_advice_in_a_job_is_its_script(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["cluster.address=10.0.0.1:6379", "run.dir=r"]
    config = load_config(files, overrides)
    assert "cluster.address" in resume_advice(config, files, overrides)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    assert resume_advice(config, files, overrides) == "submit the job script again to resume"


def test_resume_hint_names_the_newest_checkpoint(tmp_path: Path) -> None:
    assert resume_hint(tmp_path, "how").startswith("no checkpoint; ")
    Checkpoints(tmp_path / "checkpoints", keep_last=1).save(4, {}, lambda path: SAVED)
    assert resume_hint(tmp_path, "how") == "step 4 is saved; how"
