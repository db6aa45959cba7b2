"""A run that trains on truncated sampling: engine and trainer agree on the log-probability of every token, also of
responses that are paused and continued with newer weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import ALPHABET, metrics, train
from tests.e2e.test_async_run import ONE_RANK

pytestmark = pytest.mark.slow

TRUNCATED = ("rollout.top_p=0.8", "rollout.min_p=0.01", "rollout.keep_sampling_mask=true", "trainer.steps=3")
CHECKED = ("model.check_logits=always", "rollout.max_logp_gap=0.0001")
"""Checks before the first step. The check of the model computes logits of all tokens."""


@pytest.mark.on_demand  # the first responses of the run below are compared too, and so are its gaps before step 1
def test_run_on_truncated_sampling_agrees_with_the_engine(task: Path, tmp_path: Path) -> None:
    train(task, tmp_path / "run", *TRUNCATED, *CHECKED, "observe.keep_trajectories=1")
    rows = metrics(tmp_path / "run")
    for step in (1, 2, 3):
        # float32 on both sides; the truncated mass of 0.2 alone would give 0.22
        assert rows[step]["rollout/logp_diff_max"] < 1e-4
        assert 1 < rows[step]["rollout/kept_tokens_mean"] < len(ALPHABET)
        assert rows[step]["actor/grad_norm"] > 0


def test_paused_responses_keep_the_sets_of_their_tokens(task: Path, tmp_path: Path) -> None:
    apart = ("cluster.placement=disaggregated", *ONE_RANK)
    partial = ("rollout.max_staleness=2", "rollout.partial_tokens=4", "rollout.swap=keep")
    train(task, tmp_path / "run", *TRUNCATED, *CHECKED, *apart, *partial, "algorithm.dynamic_sampling.enable=false")
    rows = metrics(tmp_path / "run")
    assert all(rows[step]["actor/grad_norm"] > 0 for step in (1, 2, 3))
    assert rows[1]["rollout/logp_diff_fresh_mean"] < 1e-4
    assert all(1 < rows[step]["rollout/kept_tokens_mean"] < len(ALPHABET) for step in (1, 2, 3))
    assert sum(rows[step].get("engine/tokens_carried_over", 0) for step in (1, 2, 3)) > 0
