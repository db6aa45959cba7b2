"""Signs of collapse are said once, when they appear, and not in a healthy run."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.observe.collapse import CollapseSigns

HEALTHY = {
    "actor/entropy": 1.0,
    "response_tokens/mean": 200.0,
    "response_tokens/clipped_fraction": 0.1,
    "rollout/logp_diff_fresh_mean": 0.001,
    "actor/clip_fraction": 0.05,
    "actor/ppo_kl": 0.01,
    "groups/without_signal": 0.4,
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
    "gradient": ({"actor/grad_norm": 30.0}, "30 times the median"),
    "weights": ({"correction/effective_sample_fraction": 0.2}, "20% of the samples"),
    "trainer": ({"time/trainer_idle_fraction": 0.7}, "wait for responses 70% of the time"),
    "generator": ({"time/generator_idle_fraction": 0.6}, "nothing to do 60% of the time"),
    "critic": ({"critic/explained_variance": -2.0}, "explains -2.00"),
}


@pytest.mark.parametrize("sign", SIGNS)
def test_a_sign_is_said_once_in_words(sign: str) -> None:
    change, words = SIGNS[sign]
    signs = CollapseSigns()
    assert [line for step in range(1, 31) for line in signs.look(step, HEALTHY)] == []
    (line,) = signs.look(31, HEALTHY | change)
    assert line.startswith("step 31: ")
    assert words in line
    assert signs.look(32, HEALTHY | change) == []


def test_a_run_that_always_was_so_is_not_a_collapse() -> None:
    signs = CollapseSigns()
    values: dict[str, Any] = {"actor/entropy": 0.01, "response_tokens/mean": 2.0, "actor/grad_norm": 1e6}
    values["response_tokens/clipped_fraction"] = 0.9
    assert [line for step in range(1, 40) for line in signs.look(step, values)] == []


def test_missing_and_null_figures_say_nothing() -> None:
    signs = CollapseSigns()
    assert signs.look(1, {"actor/entropy": None}) == []
    assert signs.look(50, {}) == []


def test_a_critic_that_has_just_begun_may_be_bad() -> None:
    assert CollapseSigns().look(5, {"critic/explained_variance": -3.0}) == []


def test_where_nothing_is_sampled_the_gradient_alone_is_watched() -> None:
    signs = CollapseSigns(())
    first = [line for step in range(1, 31) for line in signs.look(step, HEALTHY)]
    assert first == []
    (line,) = signs.look(
        31, HEALTHY | {"actor/entropy": 0.0, "rollout/logp_diff_fresh_mean": 9.0, "actor/grad_norm": 30.0}
    )
    assert "30 times the median" in line
