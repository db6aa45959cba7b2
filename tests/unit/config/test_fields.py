"""Properties of schema fields: bounds, choices, paths."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pytest

from mcore_rl.config import Config
from mcore_rl.config.fields import Domain, check_domains, leaves, make_paths_absolute
from mcore_rl.errors import ConfigError

NUMBERS = [leaf.key for leaf in leaves(Config()) if {int, float} & {leaf.type, *get_args(leaf.type)}]
ANY_NUMBER = {
    "algorithm.part_weights",
    "rollout.failed_reward",
    "reward.weight",
    "reward.correct",
    "reward.incorrect",
    "judge.weight",
    "judge.min_score",
    "judge.max_score",
    "judge.unparsable",
    "reward_model.weight",
    "algorithm.entropy_coefficient",
    "algorithm.policy_loss.cov_low",
    "algorithm.policy_loss.cov_high",
}
"""Keys without bounds, since rewards and covariances have none."""


def config_with(key: str, value: object) -> Config:
    config = Config()
    leaf = next(leaf for leaf in leaves(config) if leaf.key == key)
    setattr(leaf.section, leaf.name, value)
    return config


@pytest.mark.parametrize(
    ("domain", "allowed", "refused", "words"),
    [
        (Domain(minimum=0), 0, -1, "0 or more"),
        (Domain(minimum=1), 1, 0, "at least 1"),
        (Domain(above=0, maximum=1), 1.0, 0.0, "above 0"),
        (Domain(above=0, maximum=1), 0.5, 1.5, "at most 1"),
        (Domain(minimum=0, below=1), 0.0, 1.0, "below 1"),
        (Domain(), -7.5, math.nan, "a finite number"),
        (Domain(minimum=0), 1e30, math.inf, "a finite number"),
        (Domain(choices=("a", "b")), "b", "c", "one of a, b"),
        (Domain(choices=("a",)), "a", "mine.py:f", "one of a"),
        (Domain(choices=("auto",), above=0), "auto", "none", "one of auto, or a number above 0"),
        (Domain(choices=("a",), function=True), "mine.py:f", "c", "one of a, or module_or_file.py:function"),
    ],
)
def test_domain_violation_names_the_requirement(domain: Domain, allowed: object, refused: object, words: str) -> None:
    assert domain.violation(allowed) is None
    assert domain.violation(refused) == words
    assert domain.violation(None) is None


def test_domain_range_names_every_bound() -> None:
    assert Domain(above=0, maximum=1).range == "above 0 and at most 1"
    assert Domain(minimum=0, below=1).range == "0 or more and below 1"
    assert Domain().range is None


def test_schema_numbers_have_bounds_with_exceptions() -> None:
    unbounded = {leaf.key for leaf in leaves(Config()) if leaf.key in NUMBERS and leaf.domain.range is None}
    assert unbounded == ANY_NUMBER


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_check_domains_nan_and_infinity_are_rejected(value: float) -> None:
    for key in NUMBERS:
        with pytest.raises(ConfigError, match=rf"^{key}={value} must be a finite number"):
            check_domains(config_with(key, value))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("actor.num_ranks", 0, "actor.num_ranks=0 must be at least 1, or null"),
        ("rollout.gpu_memory_fraction", 1.5, "rollout.gpu_memory_fraction=1.5 must be at most 1"),
        ("actor.optimizer.beta2", 1.0, "actor.optimizer.beta2=1.0 must be below 1"),
        ("critic.parallel.cp", 0, "critic.parallel.cp=0 must be at least 1"),
        ("algorithm.advantage", "grop", "algorithm.advantage=grop must be one of gae, reinforce_plus_plus, grpo, "),
        ("reward.function", "maths", "reward.function=maths must be one of math, by_data_source, gsm8k, "),
    ],
)
def test_check_domains_bad_value_names_the_full_key(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_domains(config_with(key, value))
    assert str(caught.value).startswith(message)


def test_check_domains_list_items_have_choices() -> None:
    with pytest.raises(ConfigError, match=r"observe\.trackers=\['wandbb'\] must be one of tensorboard, wandb"):
        check_domains(config_with("observe.trackers", ["wandbb"]))
    check_domains(config_with("observe.trackers", ["tensorboard", "wandb"]))
    check_domains(config_with("observe.trackers", []))


def test_make_paths_absolute_changes_paths_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, untouched = Config(), Config()
    paths = [leaf for leaf in leaves(config) if leaf.domain.path]
    named = {leaf.key for leaf in leaves(config) if leaf.name in {"hf_path", "path", "tokenizer_path", "dir"}}
    assert {leaf.key for leaf in paths} >= named | {"data.train", "data.val", "trainer.export_hf"}
    for leaf in paths:
        setattr(leaf.section, leaf.name, f"here/{leaf.key}")
    config.reward.function, config.algorithm.filter = "mine.py:grade", "package.module:keep"
    config.judge.parser = "sub/mine.py:parse"
    make_paths_absolute(config)
    for leaf in paths:
        assert leaf.value == str(tmp_path / "here" / leaf.key)
        setattr(leaf.section, leaf.name, next(x.value for x in leaves(untouched) if x.key == leaf.key))
    assert config.reward.function == f"{tmp_path}/mine.py:grade"
    assert (config.judge.parser, config.algorithm.filter) == (f"{tmp_path}/sub/mine.py:parse", "package.module:keep")
    assert (config.algorithm.advantage, config.data.val) == ("grpo", None)
    config.reward.function, config.judge.parser, config.algorithm.filter = "math", None, None
    assert config == untouched


@pytest.mark.parametrize(
    ("given", "absolute"),
    [("sub/tools.yaml", "{}/sub/tools.yaml"), ("mine.py:tools", "{}/mine.py:tools"), ("package.mine:tools", None)],
)
def test_make_paths_absolute_path_or_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, absolute: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config()
    config.rollout.tools = given
    make_paths_absolute(config)
    assert config.rollout.tools == (absolute or given).format(tmp_path)


def test_make_paths_absolute_lists_and_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config()
    config.data.train, config.data.weights = ["a.jsonl", "/b/*.jsonl"], {"a.jsonl": 2.0}
    config.data.curriculum = "mine.py:order"
    make_paths_absolute(config)
    assert config.data.train == [f"{tmp_path}/a.jsonl", "/b/*.jsonl"]
    assert config.model.tokenizer_path is None
    assert config.data.weights == {f"{tmp_path}/a.jsonl": 2.0}
    assert config.data.curriculum == f"{tmp_path}/mine.py:order"


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_check_domains_mapping_values_have_bounds(weight: float) -> None:
    config = Config()
    config.data.weights = {"a.jsonl": 1.0, "b.jsonl": weight}
    with pytest.raises(ConfigError, match=r"^data\.weights=.* must be (above 0|a finite number)"):
        check_domains(config)
