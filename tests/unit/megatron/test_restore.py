"""Check of a checkpoint's keys for reference weights, before any data is read."""

from __future__ import annotations

import pytest

from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.checkpoint.restore import check_reference_kept

POLICY = ["decoder.layers.0.weight", "optimizer.state.exp_avg.decoder.layers.0.weight"]
BOTH = [*POLICY, "reference.decoder.layers.0.weight"]


def test_check_reference_kept_on_one_side_only_raises() -> None:
    check_reference_kept("step_2", BOTH, kept_here=True)
    check_reference_kept("step_2", POLICY, kept_here=False)
    remedy = r".*algorithm\.kl\.in_loss.*reference\.\*.*run\.dir"
    with pytest.raises(CheckpointError, match=f"step_2 contains .* reference, but this run saves none{remedy}"):
        check_reference_kept("step_2", BOTH, kept_here=False)
    with pytest.raises(CheckpointError, match=f"step_2 does not contain .* reference, but this run saves them{remedy}"):
        check_reference_kept("step_2", POLICY, kept_here=True)
