"""Configurations and checkpoints that `mcore-rl serve` accepts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mcore_rl.cli import _of_run
from mcore_rl.config import load_config
from mcore_rl.config.rules.validation import validate_keys
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.serving import keep_served
from mcore_rl.trainer.checkpoints import Checkpoints, check_step
from tests.readme import ROOT

KINDS = ("agent", "async", "distill", "dpo", "latent", "ppo", "see", "tool", "warm_start")
OF_POLICY = ("run", "model", "actor", "weights", "cluster", "sandbox")


@pytest.mark.parametrize("kind", KINDS)
def test_served_configuration_is_valid_whatever_it_trains(kind: str, tmp_path: Path) -> None:
    config = load_config([str(ROOT / "configs" / f"demo_{kind}_cpu.yaml")], [], needs_data=False)
    before = dataclasses.asdict(config)
    keep_served(config, tmp_path / "prompts.jsonl")
    validate_keys(config)
    after = dataclasses.asdict(config)
    assert {name: after[name] for name in OF_POLICY} == {name: before[name] for name in OF_POLICY}
    assert config.rollout.max_engine_restarts == before["rollout"]["max_engine_restarts"]


def test_reward_model_is_not_served(tmp_path: Path) -> None:
    files = [str(ROOT / "configs" / "demo_cpu.yaml")]
    config = load_config(files, ["trainer.objective=reward_model"], needs_data=False)
    with pytest.raises(ConfigError, match=r"trainer\.objective=reward_model trains a model that generates no text"):
        keep_served(config, tmp_path)


def test_serve_takes_a_run_directory_or_one_of_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    checkpoint = run_dir / "checkpoints" / "step_4"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"step_4 has no config.yaml; name a run directory"):
        _of_run(str(checkpoint), [])
    (run_dir / "config.yaml").touch()
    expected = str(run_dir / "config.yaml"), [f"run.dir={run_dir}", "a=b"]
    assert _of_run(str(run_dir), ["a=b"]) == (*expected, None)
    assert _of_run(f"{checkpoint}/", ["a=b"]) == (*expected, 4)
    monkeypatch.chdir(checkpoint)
    assert _of_run(".", ["a=b"]) == (*expected, 4)
    assert _of_run("my.yaml", ["a=b"]) == ("my.yaml", ["a=b"], None)


def test_checkpoint_of_another_step_names_the_complete_ones(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_4").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"step_4 is no complete checkpoint; complete in .*: none"):
        check_step(tmp_path, 4)
    check_step(tmp_path / "new", None)
    assert Checkpoints(tmp_path / "new", keep_last=1).of_step(None) is None
