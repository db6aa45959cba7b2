"""Translation of verl's advantage estimators with options of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.migration.test_verl import translated


def test_import_gdpo_weights_have_names(tmp_path: Path) -> None:
    parts = "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[right,format,accuracy]"
    _, draft, _ = translated(f"{parts} algorithm.gdpo_reward_weights=[1,0.5,2]", tmp_path)
    assert draft.values["algorithm.advantage"] == "gdpo"
    # `accuracy` is the name of a metric; a part of that name is renamed.
    assert draft.values["algorithm.part_weights"] == {"right": 1.0, "format": 0.5, "accuracy_part": 2.0}
    assert "over its responses, as in the paper" in " ".join(draft.changes)
    _, draft, _ = translated(parts, tmp_path)
    assert draft.values["algorithm.part_weights"] == {"right": 1.0, "format": 1.0, "accuracy_part": 1.0}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("", "gdpo needs names of reward parts"),
        ("algorithm.gdpo_reward_keys=[a,b] algorithm.gdpo_reward_weights=[1]", "and a weight for each or for none"),
        ("algorithm.gdpo_reward_keys=[a,score]", "score is no part of a score here"),
        ("algorithm.gdpo_reward_keys=[a] algorithm.norm_adv_by_std_in_grpo=False", "always divides by the group's std"),
    ],
)
def test_import_gdpo_without_named_parts_is_a_blocker(override: str, reason: str, tmp_path: Path) -> None:
    _, draft, _ = translated(f"algorithm.adv_estimator=gdpo {override}", tmp_path)
    assert reason in " ".join(draft.blockers)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_import_optimal_token_baseline_names_the_difference(name: str, tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor.calculate_sum_pi_squared=True"
    _, draft, uncovered = translated(f"algorithm.adv_estimator={name} {actor}", tmp_path)
    assert draft.values["algorithm.advantage"] == "optimal_token_baseline"
    assert f"algorithm.adv_estimator={name} has baseline 0 in verl" in " ".join(draft.changes)
    assert "sum_pi_squared" not in " ".join(uncovered)
