"""Rules for the entries of algorithm.per_source and for baselines by source and role."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.algorithms.configured import configured_losses
from mcore_rl.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    PolicyLossConfig,
    SourceConfig,
    SourceLossConfig,
)
from mcore_rl.config.load import as_yaml, load_config, load_text
from mcore_rl.config.rules.validation import validate
from mcore_rl.errors import ConfigError
from tests.unit.user_losses import write_text_loss


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.per_source=[{weight: 2}]"], "algorithm.per_source"),
        (["algorithm.per_source=[{source: a, policy_loss: {tau: 1}}]"], "per_source[0].policy_loss.name must be set"),
        (["algorithm.per_source=[{source: a, policy_loss: {name: sft}}]"], "policy_loss.name=sft must be one of ppo_c"),
        (["algorithm.per_source=[{source: a, kl_in_loss: -1}]"], "kl_in_loss=-1.0 must be 0 or more, or null"),
        (
            [
                "algorithm.per_source=[{source: a, entropy_coefficient: 0.1}]",
                "algorithm.entropy_control.target=0.5",
            ],
            "algorithm.per_source, a: entropy_coefficient=0.1 has no effect with algorithm.entropy_control.target=0.5",
        ),
        (
            ["algorithm.per_source=[{source: a, policy_loss: {name: real}}]", "rollout.samples_per_prompt=1"],
            "algorithm.per_source, a: policy_loss.name=real compares correct and wrong responses to a prompt",
        ),
        (
            ["algorithm.baseline=role", "rollout.episode=s.py:S", "observe.keep_trajectories=2"],
            "observe.keep_trajectories=2 does not store the roles of responses, which algorithm.baseline=role needs",
        ),
        (
            ["algorithm.baseline=source", "algorithm.dynamic_sampling.enable=true"],
            "algorithm.dynamic_sampling.enable=true with algorithm.baseline=source drops groups of equal rewards",
        ),
        (
            ["algorithm.baseline=role", "rollout.episode=s.py:S", "algorithm.dynamic_sampling.enable=true"],
            "set algorithm.dynamic_sampling.metric=reward",
        ),
        (["algorithm.policy_loss.name=sft", "algorithm.baseline=role"], "have no effect with algorithm.policy_loss"),
        (["algorithm.per_source=[{source: a, weight: -2}]"], "weight=-2.0 must be 0 or more"),
        (["algorithm.per_source=[{source: a, wight: 2}]"], "wight"),
        *(
            (
                ["algorithm.per_source=[{source: a}, {source: b, advantage: maxrl}]", changed],
                f"{named} changes the reward, but algorithm.per_source, b: advantage=maxrl needs rewards of at least 0",
            )
            for changed, named in (
                ("algorithm.length_penalty=0.1", "algorithm.length_penalty=0.1"),
                ("algorithm.kl.in_reward=0.1", "algorithm.kl.in_reward=0.1"),
                ("reward.incorrect=-1", "reward.incorrect=-1"),
                ("reward.manager=dapo", "reward.overlong (on by reward.overlong.enable or reward.manager)"),
            )
        ),
    ],
)
def test_settings_of_sources_that_contradict_are_rejected(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(load_config(base, overrides))
    assert message in str(raised.value)


def own(**options: object) -> list[SourceConfig]:
    return [SourceConfig("math", policy_loss=SourceLossConfig(**options))]  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"per_source": own(name="gspo", tau=1.0)},
            "policy_loss.tau: not an option of policy_loss.name=gspo",
        ),
        ({"per_source": own(name="gsop")}, "policy_loss.name=gsop is not known; did you mean gspo?"),
        (
            {"per_source": own(name="decoupled_ppo"), "correction": CorrectionConfig(kind="mask")},
            "algorithm.correction.kind=mask: policy_loss.name=decoupled_ppo does not support corrections",
        ),
        (
            {"per_source": own(name="decoupled_ppo"), "old_logp": "rollout"},
            "algorithm.old_logp=rollout has no effect: policy_loss.name=decoupled_ppo reads the log-probabilities of b",
        ),
    ],
)
def test_loss_of_a_source_that_cannot_be_combined_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configured_losses(AlgorithmConfig(**settings))  # type: ignore[arg-type]  # by name
    assert str(raised.value).startswith(f"algorithm.per_source, math: {message}")


def test_rollout_as_old_policy_needs_one_loss_that_reads_it() -> None:
    reinforce, clipped = PolicyLossConfig(name="reinforce"), own(name="ppo_clip")
    configured_losses(AlgorithmConfig(policy_loss=reinforce, per_source=clipped, old_logp="rollout"))
    with pytest.raises(ConfigError, match=r"old_logp=rollout has no effect: .*name=reinforce reads no old policy"):
        configured_losses(AlgorithmConfig(policy_loss=reinforce, per_source=own(name="dro"), old_logp="rollout"))


def test_loss_settings_inherit_what_an_entry_does_not_set(base: str) -> None:
    given = "algorithm.per_source=[{source: a}, {source: b, kl_in_loss: 0.2}, {source: c, policy_loss: {name: gspo}}]"
    config = load_config(base, [given, "algorithm.policy_loss.clip_low=0.1", "algorithm.entropy_coefficient=0.3"])
    validate(config)
    assert load_text(as_yaml(config)) == config
    default, of_b, of_c = config.algorithm.loss_settings
    assert default is config.algorithm
    assert config.algorithm.loss_sources == ["b", "c"]
    assert (of_b.policy_loss, of_b.kl, of_b.entropy_coefficient) == (default.policy_loss, KLConfig(0.2), 0.3)
    assert (of_c.policy_loss.name, of_c.policy_loss.clip_low, of_c.kl) == ("gspo", None, default.kl)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"per_source": own(name="ppo_clip")}, "algorithm.per_source"),
        ({"baseline": "role"}, "algorithm.baseline=role"),
        ({"baseline": "source"}, "algorithm.baseline=source"),
    ],
)
def test_default_loss_on_texts_is_rejected_with_keys_of_samples(
    settings: dict[str, object], key: str, tmp_path: Path
) -> None:
    default = PolicyLossConfig(name=write_text_loss(tmp_path))
    configured_losses(AlgorithmConfig(policy_loss=default))
    with pytest.raises(ConfigError, match=rf"^{key} has no effect: .*:likelihood has no advantages .*; add Needs\("):
        configured_losses(AlgorithmConfig(policy_loss=default, **settings))  # type: ignore[arg-type]  # by name
