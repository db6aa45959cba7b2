"""Errors of users in configurations, and values that must round-trip unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.load import as_yaml
from mcore_rl.config.reading.unknown_keys import ALIASES, known_keys
from mcore_rl.errors import ConfigError

MINIMAL = "run: {dir: runs/x}\nmodel: {hf_path: models/x}\ndata: {train: train.jsonl}\n"


@pytest.fixture
def minimal(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    return str(path)


def test_load_config_overrides_take_precedence(minimal: str) -> None:
    config = load_config(minimal, ["trainer.steps=3", "actor.parallel.ep=2", "actor.optimizer.lr=1e-4", "run.seed=7"])
    assert (config.trainer.steps, config.actor.parallel.ep, config.run.seed) == (3, 2, 7)
    assert config.actor.optimizer.lr == pytest.approx(1e-4)


@pytest.mark.parametrize("text", [r"Score: (\d+)", "- a dash", "{prompt}: {response}"])
def test_load_config_override_with_colon_or_dash_is_text(minimal: str, text: str) -> None:
    assert load_config(minimal, [f"judge.score_pattern={text}"]).judge.score_pattern == text


def test_load_config_kwargs_keep_their_types(minimal: str, tmp_path: Path) -> None:
    overrides = ["algorithm.advantage_kwargs.scale=1e-3", "algorithm.policy_loss.kwargs={steps: 2, kinds: [a, b]}"]
    config = load_config(minimal, [*overrides, "algorithm.policy_loss.kwargs.on=true"])
    assert config.algorithm.advantage_kwargs == {"scale": pytest.approx(1e-3)}
    assert config.algorithm.policy_loss.kwargs == {"steps": 2, "kinds": ["a", "b"], "on": True}
    (tmp_path / "resolved.yaml").write_text(as_yaml(config))
    assert load_config(str(tmp_path / "resolved.yaml")) == config


def test_load_config_exponent_without_point_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL + "actor: {optimizer: {lr: 3e-5}}\n")
    assert load_config(str(path)).actor.optimizer.lr == pytest.approx(3e-5)


@pytest.mark.parametrize(
    ("override", "suggested"),
    [
        ("actor.paralel.ep=2", "actor.parallel.ep"),
        ("algorithm.clip_high=0.3", "algorithm.policy_loss.clip_high"),
        ("trainr.steps=2", "trainer.steps"),
        ("actor.lr=1e-5", "actor.optimizer.lr"),
        ("trainer.seed=2", "run.seed"),
        ("rewrd.kwargs.x=1", "reward.kwargs"),
        ("trainr={}", "trainer"),
        ("actor_rollout_ref.rollout.n=8", "rollout.samples_per_prompt"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "rollout.tp"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "actor.parallel.tp"),
        ("n-samples-per-prompt=8", "rollout.samples_per_prompt"),
    ],
)
def test_load_config_unknown_key_suggests_the_nearest(minimal: str, override: str, suggested: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key .*did you mean {suggested}\?"):
        load_config(minimal, [override])


def test_load_config_names_of_other_trainers_suggest_keys() -> None:
    assert set(ALIASES.values()) <= set(known_keys())
    assert not set(ALIASES) & set(known_keys())


def test_load_config_unknown_key_of_a_file_is_named_fully(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL + "actor_rollout_ref: {rollout: {n: 8, name: vllm}}\n")
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.n; did you mean rollout\.samples_per_prompt"):
        load_config(str(path))


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.steps", "=", "3"],
        ["trainer.steps", "=3"],
        ["trainer.steps=", "3"],
        ["run.seed=1", "trainer.steps = 3"],
        ["run.seed=1", "trainer.steps", "=", "3", "rollout.tp=1"],
    ],
)
def test_load_config_blanks_around_equals_get_a_hint(minimal: str, words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^write trainer\.steps=3 without blanks around =$"):
        load_config(minimal, words)


def test_load_config_invalid_override_names_the_form(minimal: str) -> None:
    for word in ("trainer.steps", "=3"):
        with pytest.raises(ConfigError, match="must have the form key=value"):
            load_config(minimal, [word])
    assert load_config(minimal, ["data.plain_template=a = b {prompt}"]).data.plain_template == "a = b {prompt}"


@pytest.mark.parametrize("override", ["trainer.steps=many", "actor.parallel.tp=1.5", "rollout.temperature=[1]"])
def test_load_config_wrong_type_names_the_key(minimal: str, override: str) -> None:
    with pytest.raises(ConfigError, match=override.split("=", maxsplit=1)[0].replace(".", r"\.")):
        load_config(minimal, [override])


def test_load_config_value_for_a_section_is_rejected(minimal: str) -> None:
    with pytest.raises(ConfigError, match="trainer is a section"):
        load_config(minimal, ["trainer=3"])


def test_load_config_missing_required_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("run: {dir: runs/x}\ndata: {train: t.jsonl}\n")
    with pytest.raises(ConfigError, match=r"model\.hf_path must be set"):
        load_config(str(path))


@pytest.mark.parametrize("text", ["- a\n- b\n", "run: {dir: [\n", "\x00"])
def test_load_config_file_without_mapping_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_config(str(path))


def test_load_config_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config("nowhere.yaml")


def test_load_config_endless_nesting_is_rejected(minimal: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    # One bracket per line, because PyYAML's search for keys on a line takes seconds.
    path.write_text("run: " + "[\n" * 10_000)
    with pytest.raises(ConfigError, match=r"deep\.yaml is not valid YAML"):
        load_config(str(path))
    with pytest.raises(ConfigError, match=r"trainer\.steps"):
        load_config(minimal, ["trainer.steps=" + "[\n" * 10_000])


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("data.val=v.jsonl", ["v.jsonl"]),
        ("data.val=[v.jsonl, 'w x.jsonl']", ["v.jsonl", "w x.jsonl"]),
        ("data.val=a,b*.jsonl", ["a,b*.jsonl"]),  # a comma is part of a path
        ("data.val=null", None),
    ],
)
def test_load_config_single_path_becomes_a_list(minimal: str, override: str, names: list[str] | None) -> None:
    config = load_config(minimal, [override])
    assert (config.data.train, config.data.val) == (["train.jsonl"], names)


def test_load_config_data_weights_map_paths_to_numbers(minimal: str, tmp_path: Path) -> None:
    config = load_config(minimal, ["data.weights={a/b.c.jsonl: 2, '*.csv': 0.5}"])
    assert config.data.weights == {"a/b.c.jsonl": 2.0, "*.csv": 0.5}
    (tmp_path / "resolved.yaml").write_text(as_yaml(config))
    assert load_config(str(tmp_path / "resolved.yaml")) == config
    with pytest.raises(ConfigError, match=r"data\.weights"):
        load_config(minimal, ["data.weights={a: often}"])
