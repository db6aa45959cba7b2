"""scripts/compare_staleness.py compares losses that can be configured, each with and without a correction."""

from __future__ import annotations

import pytest
from compare_staleness import ANCHORED, CORRECTED, LOSSES, losses_of_eta4

from mcore_rl.algorithms.configured import configured_corrections, configured_loss
from mcore_rl.config import load_config
from tests.readme import ROOT


@pytest.mark.parametrize("loss", [*LOSSES, *ANCHORED])
def test_loss_on_stale_data_differs_by_its_correction_only(loss: str) -> None:
    ways, corrects = losses_of_eta4(), {}
    for name in (loss, f"{loss}_{CORRECTED}"):
        config = load_config(str(ROOT / "configs/demo_think_cpu.yaml"), list(ways[name]))
        assert (config.rollout.max_staleness, config.algorithm.policy_loss.name) == (4, loss)
        built = configured_loss(config.algorithm)
        # The engine's probability is in the ratio of the loss, or in the weight of a correction.
        corrects[name] = built.needs.rollout_logp or bool(configured_corrections(config, built))
    assert list(corrects.values()) == [False, True]
