"""Configurations and checkpoints that `mcore-rl serve` accepts."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest

from mcore_rl.cli import _of_run
from mcore_rl.config import load_config
from mcore_rl.config.fields import Leaf, leaves
from mcore_rl.config.rules.validation import validate_keys
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.serving import PROMPTS, keep_served
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
    before["actor"]["moe"]["router_replay"] = "none"
    assert {name: after[name] for name in OF_POLICY} == {name: before[name] for name in OF_POLICY}
    assert config.rollout.max_engine_restarts == before["rollout"]["max_engine_restarts"]


RUNS = {
    "tools": ["rollout.tools=a.py"],
    "gateway": ["rollout.episode=gateway", "rollout.harness=a:b"],
    "truncated": ["rollout.top_p=0.9", "rollout.keep_sampling_mask=true", "actor.moe.router_replay=engine"],
}


def _others(leaf: Leaf) -> list[object]:
    """Return other values of a key: those that are certainly of its type."""
    domain, value = leaf.domain, leaf.value
    if isinstance(value, bool):
        return [not value]
    if domain.choices:
        return [choice for choice in domain.choices if choice != value]
    if isinstance(value, int | float):
        return [value + 1, value - 1, type(value)(value / 2)]
    return [1] if domain.minimum is not None or domain.above is not None else ["a:b"]


@pytest.mark.parametrize("kind", RUNS)
def test_served_configuration_is_valid_with_every_key_of_a_run(kind: str, tmp_path: Path) -> None:
    run = load_config([str(ROOT / "configs" / "demo_cpu.yaml")], RUNS[kind], needs_data=False)
    validate_keys(run)
    served = []
    for leaf in leaves(run.rollout, "rollout."):
        for value in _others(leaf):
            config = copy.deepcopy(run)
            setattr(config.rollout, leaf.name, value)
            try:
                validate_keys(config)
            except (ConfigError, TypeError, AttributeError):  # no run has it
                continue
            keep_served(config, tmp_path / "prompts.jsonl")
            validate_keys(config)
            served.append(leaf.key)
            break
    assert len(served) > 20


def test_served_options_of_sampling_and_tool_calls_are_those_of_the_run() -> None:
    chosen = ["min_p=0.1", "keep_sampling_mask=true", "tools=a.py", "tool_parser=hermes"]
    chosen = [f"rollout.{each}" for each in chosen]
    config = load_config([str(ROOT / "configs" / "demo_cpu.yaml")], chosen, needs_data=False)
    keep_served(config, PROMPTS)
    validate_keys(config)
    assert all(Path(path).exists() for path in config.data.train)
    rollout = config.rollout
    assert (rollout.min_p, rollout.keep_sampling_mask) == (0.1, False)
    assert (rollout.tools, rollout.tool_parser) == (None, "hermes")


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
