"""Comparison of engines and trainer before the first step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.runs import ONE_RANK, TrainProcess
from tests.e2e.test_async_run import AHEAD

pytestmark = pytest.mark.slow

ALONE = ("actor.num_ranks=1", "actor.parallel.ep=1", "cluster.gpus_per_node=3")


@pytest.mark.parametrize("overrides", [ONE_RANK, pytest.param((*AHEAD, *ALONE), marks=pytest.mark.on_demand)])
def test_run_with_a_gap_above_the_limit_stops_before_step_1(
    task: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """float32 rounding of two implementations exceeds 1e-12."""
    run_dir = tmp_path / "run"
    with TrainProcess(task, run_dir, (*overrides, "rollout.max_logp_gap=1e-12")) as run:
        assert run.finish() == 2, run.text()[-4000:]
        (error,) = [line for line in run.text().splitlines() if line.startswith("error:")]
        assert "rollout.max_logp_gap is 1e-12" in error
        assert re.search(r"log-probabilities of rollout engine [01] and the trainer", error), error
        figure = float(re.search(r"differ by (\S+) nats", error)[1])  # type: ignore[index]
        assert 1e-12 < figure < 1e-4, error
        assert not run.left_after(30)
    assert not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").read_text()
    assert not list((run_dir / "checkpoints").glob("step_*"))
