"""algorithm.correction.kind=auto."""

from __future__ import annotations

import pytest

from mcore_rl.algorithms.configured import configured_corrections, configured_loss
from mcore_rl.config.load import load_text


@pytest.mark.parametrize(
    ("quantization", "loss", "kind", "wanted"),
    [
        ("none", "ppo_clip", "auto", None),
        ("fp8", "ppo_clip", "auto", "truncate"),
        ("fp8", "ppo_clip", "none", None),
        ("fp8", "ppo_clip", "mask", "mask"),
        ("none", "ppo_clip", "truncate", "truncate"),
        ("fp8", "decoupled_ppo", "auto", None),  # applies an importance weight itself
        ("fp8", "sft", "auto", None),
    ],
)
def test_correction_auto_truncates_quantised_rollouts(
    quantization: str, loss: str, kind: str, wanted: str | None
) -> None:
    config = load_text("run: {dir: x}\nmodel: {hf_path: y}\n", needs_data=False)
    config.rollout.quantization, config.algorithm.policy_loss.name = quantization, loss
    config.algorithm.correction.kind = kind
    corrections = configured_corrections(config, configured_loss(config.algorithm))
    assert [correction.config.kind for correction in corrections] == ([] if wanted is None else [wanted])
