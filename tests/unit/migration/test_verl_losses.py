"""verl's policy losses whose options have names of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.migration.test_verl import translated

ACTOR = "actor_rollout_ref.actor"
SAPO, DPPO = (f"{ACTOR}.policy_loss.loss_mode={name}" for name in ("sapo", "dppo_tv"))
BYPASS = "algorithm.rollout_correction.bypass_mode=True"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        (f"{SAPO} {ACTOR}.tau_neg=1.5", "policy_loss.tau_neg", 1.5),
        (SAPO, "policy_loss.tau_pos", 1.0),
        # verl's loss of this name always averages per response.
        (f"{SAPO} {ACTOR}.loss_agg_mode=token-mean", "loss_aggregation", "seq-mean-token-mean"),
        (f"{DPPO} {ACTOR}.clip_ratio_high=0.15", "policy_loss.clip_high", 0.15),
        (f"{DPPO} {ACTOR}.clip_ratio_c=10", "policy_loss.ratio_cap", 10),
        (DPPO, "policy_loss.ratio_cap", 3.0),
        (DPPO, "policy_loss.dual_clip", None),
        (DPPO, "policy_loss.anchor", "old"),
        (f"{DPPO} {BYPASS}", "policy_loss.anchor", None),
    ],
)
def test_import_loss_options_become(override: str, key: str, value: object, tmp_path: Path) -> None:
    _, draft, _ = translated(f"algorithm.adv_estimator=grpo {override}", tmp_path)
    assert draft.values.get(f"algorithm.{key}") == value
    # Our default of the anchor is the engine, so the bypass of these losses is no difference.
    assert not any("bypass_mode" in line for line in draft.changes)
