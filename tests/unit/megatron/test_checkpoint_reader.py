"""Check of a checkpoint's keys for reference weights, before any data is read."""

from __future__ import annotations

import pytest

from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.checkpoint.reader import check_reference_kept

POLICY = ["decoder.layers.0.weight", "optimizer.state.exp_avg.decoder.layers.0.weight"]
BOTH = [*POLICY, "reference.decoder.layers.0.weight"]


@pytest.mark.parametrize(
    ("stored", "kept_here", "message"),
    [
        (BOTH, False, "step_2 contains the weights of a reference, but this run saves none"),
        (POLICY, True, "step_2 does not contain the weights of a reference, but this run saves them"),
    ],
)
def test_check_reference_kept_on_one_side_only_raises(stored: list[str], kept_here: bool, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{message}.*algorithm\.kl\.in_loss.*reference\.\*.*run\.dir"):
        check_reference_kept("step_2", stored, kept_here=kept_here)


@pytest.mark.parametrize(("stored", "kept_here"), [(BOTH, True), (POLICY, False)])
def test_check_reference_kept_on_both_or_no_side_passes(stored: list[str], kept_here: bool) -> None:
    check_reference_kept("step_2", stored, kept_here=kept_here)
