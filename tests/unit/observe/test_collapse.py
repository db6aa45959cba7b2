"""Signs of collapse: reported once, and not in a healthy run."""

from __future__ import annotations

import pytest

from mcore_rl.algorithms.registry import POLICY_LOSSES
from mcore_rl.config.reward import WeightedFunctionConfig
from mcore_rl.config.schema import Config
from mcore_rl.observe.guide.policy import UPPER_CLIPS
from mcore_rl.observe.signs import CollapseSigns, signs_for
from tests.unit.config.test_fields import config_with

HEALTHY = {
    "actor/entropy": 1.0,
    "response_tokens/mean": 200.0,
    "response_tokens/clipped_fraction": 0.1,
    "rollout/logp_diff_fresh_mean": 0.001,
    "actor/clip_fraction": 0.05,
    "actor/ppo_kl": 0.01,
    "groups/without_signal": 0.4,
    "reward/mean": 0.0,
    "groups/all_equal": 0.0,
    "actor/grad_norm": 1.0,
    "correction/effective_sample_fraction": 0.9,
    "critic/explained_variance": 0.2,
    "time/trainer_idle_fraction": 0.3,
    "time/generator_idle_fraction": 0.3,
}
SIGNS: dict[str, tuple[dict[str, float], str]] = {
    "entropy": ({"actor/entropy": 0.09}, "entropy fell from 1 to 0.09"),
    "length": ({"response_tokens/mean": 50.0}, "shrank from 200 to 50"),
    "truncation": ({"response_tokens/clipped_fraction": 0.6}, "60% of the responses are cut off"),
    "engine": ({"rollout/logp_diff_fresh_mean": 0.2}, "weights.verify_every=1"),
    "clip": ({"actor/clip_fraction": 0.5}, "50% of the tokens are clipped"),
    "kl": ({"actor/ppo_kl": 0.8}, "0.80 nats"),
    "kl negative": ({"actor/ppo_kl": -0.8}, "-0.80 nats"),
    "signal": ({"groups/without_signal": 1.0}, "100% of the groups"),
    "equal scores": ({"groups/all_equal": 1.0}, "are equal (mean reward 0): reward.function=math cannot tell"),
    "gradient": ({"actor/grad_norm": 30.0}, "30 times the median"),
    "weights": ({"correction/effective_sample_fraction": 0.2}, "20% of the samples"),
    "trainer": ({"time/trainer_idle_fraction": 0.7}, "wait for responses 70% of the time"),
    "generator": ({"time/generator_idle_fraction": 0.6}, "nothing to do 60% of the time"),
    "critic": ({"critic/explained_variance": -2.0}, "explains -2.00"),
}


@pytest.mark.parametrize(("change", "words"), SIGNS.values(), ids=SIGNS)
def test_sign_is_reported_once(change: dict[str, float], words: str) -> None:
    signs = CollapseSigns(signs_for(Config()))
    assert [line for step in range(1, 31) for line in signs.check(step, HEALTHY)] == []
    (line,) = signs.check(31, HEALTHY | change)
    assert line.startswith("step 31: ")
    assert words in line
    assert signs.check(32, HEALTHY | change) == []


def test_unchanged_metrics_are_no_collapse() -> None:
    signs = CollapseSigns(signs_for(Config()))
    values: dict[str, float | None] = {"actor/entropy": 0.01, "response_tokens/mean": 2.0, "actor/grad_norm": 1e6}
    values["response_tokens/clipped_fraction"] = 0.9
    assert [line for step in range(1, 40) for line in signs.check(step, values)] == []


def test_missing_metrics_and_first_steps_of_a_critic_give_no_warning() -> None:
    signs = CollapseSigns(signs_for(Config()))
    assert signs.check(1, {"actor/entropy": None}) == []
    assert signs.check(5, {"critic/explained_variance": -3.0}) == []
    assert signs.check(50, {}) == []


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_updates_skipped_again_and_again_give_one_warning(role: str) -> None:
    """The first scale of a run is made to be lowered, and a scale that has doubled may be too high for two updates."""
    config = config_with(f"{role}.optimizer.loss_scale.initial", 65536.0)
    signs = CollapseSigns(signs_for(config))
    healthy = [*range(1, 18), 40, 41, 60, 61]
    skips = dict.fromkeys([*healthy, *range(80, 90)], 1.0)
    (line,) = (
        line for step in range(1, 90) for line in signs.check(step, {f"{role}/skipped_updates": skips.get(step, 0)})
    )
    assert line == (
        f"step 84: updates of the {role} were skipped in 5 steps in a row (1 in this one), because gradients overflow: "
        "set model.dtype=bfloat16 if updates are skipped again and again"
    )


def test_supervised_run_watches_only_the_gradient() -> None:
    signs = CollapseSigns(())
    assert [line for step in range(1, 31) for line in signs.check(step, HEALTHY)] == []
    (line,) = signs.check(31, HEALTHY | {"actor/entropy": 0.0, "actor/grad_norm": 30.0})
    assert "30 times the median" in line


def warning(config: Config, **change: float) -> str:
    """Return the warning about one metric; `__` stands for `/` in its name."""
    signs = CollapseSigns(signs_for(config))
    values = HEALTHY | {name.replace("__", "/"): value for name, value in change.items()}
    assert signs.check(40, HEALTHY) == []
    (line,) = signs.check(41, values)
    return line


REMEDIES: list[tuple[dict[str, float], str, str, object]] = [
    ({"rollout__logp_diff_fresh_mean": 0.3}, "weights.verify_every=1", "weights.verify_every", 1),
    ({"rollout__logp_diff_fresh_mean": 0.3}, "router_replay=engine", "actor.moe.router_replay", "engine"),
    ({"response_tokens__clipped_fraction": 0.9}, "reward.overlong.enable", "reward.overlong.enable", True),
    ({"response_tokens__clipped_fraction": 0.9}, "reward.overlong.enable", "reward.manager", "dapo"),
    ({"actor__entropy": 0.01}, "clip_high", "algorithm.policy_loss.name", "kl_cov"),
    ({"actor__entropy": 0.01}, "clip_high", "algorithm.policy_loss.name", "reinforce"),
]
LEFT_OUT: list[tuple[dict[str, float], str, str, object]] = [
    ({"actor__clip_fraction": 0.9}, "number of updates", "trainer.prompts_per_update", 8),
    ({"actor__ppo_kl": 0.9}, "number of updates", "trainer.update_epochs", 2),
    ({"actor__ppo_kl": 0.9}, "rollout.max_staleness", "rollout.max_staleness", 2),
    ({"actor__clip_fraction": 0.9}, "rollout.max_staleness", "rollout.max_staleness", 2),
    ({"time__generator_idle_fraction": 0.9}, "lower rollout.num_engines", "rollout.num_engines", 2),
    ({"rollout__logp_diff_fresh_mean": 0.3}, "actor.fp8=none", "actor.fp8", "blockwise"),
    ({"rollout__logp_diff_fresh_mean": 0.3}, "rollout.max_logp_gap=auto", "rollout.max_logp_gap", None),
]


@pytest.mark.parametrize(("change", "remedy", "key", "value"), REMEDIES)
def test_warning_omits_remedy_already_set(change: dict[str, float], remedy: str, key: str, value: object) -> None:
    assert remedy in warning(Config(), **change)
    assert remedy not in warning(config_with(key, value), **change)


@pytest.mark.parametrize(("change", "remedy", "key", "value"), LEFT_OUT)
def test_warning_omits_remedy_without_effect(change: dict[str, float], remedy: str, key: str, value: object) -> None:
    assert remedy not in warning(Config(), **change)
    assert remedy in warning(config_with(key, value), **change)


def test_warning_of_systematic_difference_has_no_correction() -> None:
    line = warning(Config(), rollout__logp_diff_fresh_mean=0.3)
    assert "algorithm.correction" not in line
    assert "No correction removes a systematic difference" in line


def test_warning_of_equal_scores_names_all_graders() -> None:
    config = Config()
    config.reward.weighted = [WeightedFunctionConfig("mine.py:f"), WeightedFunctionConfig("gsm8k")]
    config.judge.hf_path = "/judge"
    assert "reward.weighted (mine.py:f, gsm8k) and judge cannot tell" in warning(config, groups__all_equal=1.0)


def test_upper_clips_match_the_registry() -> None:
    with_clip = [name for name, loss in POLICY_LOSSES.items() if "clip_high" in loss.__dataclass_fields__]
    assert sorted(UPPER_CLIPS) == sorted(with_clip)
