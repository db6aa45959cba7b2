"""Runs in float16: engines hold the trainer's weights, also after updates that were skipped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.e2e.runs import metrics, train

pytestmark = [pytest.mark.slow, pytest.mark.on_demand]

KEYS = ("model.dtype=float16", "weights.verify_every=1", "trainer.steps=2")
SCALE = "actor.optimizer.loss_scale"
MEAN_SCALES = (0.75, 0.1875)
"""Mean scale of the two updates of each step, relative to the first, if every update halves it."""


@pytest.mark.parametrize(("initial", "skipped"), [(2**16, 0), (2**60, 1)])
def test_run_in_float16_is_certified_with_and_without_skipped_updates(
    initial: int, skipped: int, task: Path, tmp_path: Path
) -> None:
    export = tmp_path / "export"
    scale = (f"{SCALE}.initial={initial}", f"{SCALE}.hysteresis=1")
    log = train(task, tmp_path / "run", *KEYS, *scale, f"trainer.export_hf={export}")
    found = re.search(r"trainer differ by ([0-9.e-]+) nats", log)
    assert found
    print(f"gap in nats: {found[1]}")
    assert float(found[1]) < 2e-3
    for step in (1, 2):
        row = metrics(tmp_path / "run")[step]
        assert row["weights/tensors_verified"] > 10
        assert row["rollout/version"] == step - 1
        updates = row["actor/skipped_updates"]
        assert (updates > 0) == bool(skipped)
        assert ("actor/grad_norm" in row) == (not skipped)
        # Two updates per step; the metric is their mean.
        assert row["actor/loss_scale"] == initial * (MEAN_SCALES[step - 1] if skipped else 1)
    with safe_open(export / "model.safetensors", "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F16"}  # noqa: SIM118
    assert json.loads((export / "config.json").read_text())["dtype"] == "float16"
