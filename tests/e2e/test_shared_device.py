"""Engine and trainer ranks that alternate on one device: the run is bitwise identical."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import metrics, train

pytestmark = pytest.mark.slow


def trained(rows: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {
        step: {key: value for key, value in row.items() if not key.startswith("memory/")} for step, row in rows.items()
    }


@pytest.mark.on_demand  # tests/distributed/test_offload covers the ranks, tests/contract the engine
def test_a_run_by_turns_repeats_the_run_without(whole_run: Path, task: Path, tmp_path: Path) -> None:
    """The second half of a run is repeated with offload, from a checkpoint of the run without offload."""
    directory = tmp_path / "by_turns"
    shutil.copytree(whole_run, directory)
    shutil.rmtree(directory / "checkpoints" / "step_4")
    parts = ("params", "grads", "optimizer")
    train(task, directory, *(f"actor.offload.{part}=true" for part in parts))
    after, before = metrics(directory), metrics(whole_run)
    assert trained(after) == before
    for step in (3, 4):
        # offloaded: parameters, gradients and two moments; released: the cache of rollout.kv_cache_gib
        assert after[step]["memory/offloaded_bytes"] > 0
        assert after[step]["memory/engine_released_bytes"] > 0.9 * 0.03 * 2**30
    names = {event["name"] for event in json.loads((directory / "timeline.json").read_text())}
    assert {"offload", "load", "sleep", "wake up weights", "wake up kv_cache"} <= names
