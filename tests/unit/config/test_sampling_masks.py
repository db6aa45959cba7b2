"""Combinations with rollout.keep_sampling_mask that cannot be trained."""

from __future__ import annotations

import re

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.rules.validation import validate
from mcore_rl.errors import ConfigError


def test_keep_sampling_mask_with_one_token_is_rejected(base: str) -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.top_k=1 leaves one token, .* at least 2"):
        validate(load_config(base, ["rollout.keep_sampling_mask=true", "rollout.top_k=1"]))


def test_keep_sampling_mask_with_gradients_of_all_tokens_is_rejected(base: str) -> None:
    kept = ["rollout.keep_sampling_mask=true", "rollout.top_p=0.9"]
    with pytest.raises(ConfigError, match=r"^algorithm\.advantage=optimal_token_baseline .* the sampled sets; set"):
        validate(load_config(base, [*kept, "algorithm.advantage=optimal_token_baseline"]))
    teacher = ["teacher.hf_path=teacher", "teacher.in_loss=1"]
    with pytest.raises(ConfigError, match=r"^teacher\.hf_path=teacher: the teacher's .* trains on the sampled sets;"):
        validate(load_config(base, [*kept, *teacher, "algorithm.advantage=grpo"]))


def test_keep_sampling_mask_still_rejects_untrained_options(base: str) -> None:
    """Penalties and greedy sampling are no truncation."""
    kept = ["rollout.keep_sampling_mask=true", "rollout.top_p=0.9", "algorithm.advantage=reinforce_plus_plus"]
    for override in ("rollout.repetition_penalty=1.1", "rollout.temperature=0"):
        with pytest.raises(ConfigError, match=re.escape(override)):
            validate(load_config(base, [*kept, override]))
