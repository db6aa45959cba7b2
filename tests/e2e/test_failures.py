"""The death of a process ends the run within 30 s with an error that names it, leaves no processes or shared memory,
and loses no checkpoint."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.runs import (
    SECONDS_TO_END,
    TrainProcess,
    assert_same_records,
    in_step,
    metrics,
    no_segment_is_left,
    train,
)

pytestmark = pytest.mark.slow


def assert_resumes_to_the_same(task: Path, run_dir: Path, whole_run: Path, *overrides: str) -> None:
    train(task, run_dir, *overrides)
    assert metrics(run_dir) == metrics(whole_run)
    assert not list((run_dir / "rollouts").glob(".*"))
    json.loads((run_dir / "timeline.json").read_text())
    assert_same_records(run_dir, whole_run)


@pytest.mark.parametrize(
    ("victim", "named", "step", "phase"),
    [
        pytest.param("ray::TrainerProcess", "trainer rank", 3, "updating", marks=pytest.mark.on_demand),
        ("ray::EngineProcess", "rollout engine 0", 3, "generating"),
    ],
)
def test_a_killed_worker_ends_the_run_by_name_and_resume_repeats_nothing(
    task: Path, whole_run: Path, tmp_path: Path, victim: str, named: str, step: int, phase: str
) -> None:
    run_dir = tmp_path / "run"
    with TrainProcess(task, run_dir, ("rollout.max_engine_restarts=0",)) as run:
        run.wait_until(in_step(run, step, phase))
        run.kill_one(victim)
        killed = time.monotonic()
        assert run.finish(SECONDS_TO_END) == 1, run.text()[-4000:]
        error = next(line for line in run.text().splitlines() if line.startswith("error:"))
        assert named in error, error
        log = run_dir / "logs" / f"{named.split(' ', maxsplit=1)[0]}"
        assert re.search(rf"{named}( \d)? died: killed by SIGKILL \(host \S+, log {log}\S*\.log\)", error), error
        assert not run.left_after(SECONDS_TO_END - (time.monotonic() - killed))
        assert no_segment_is_left()
    assert_resumes_to_the_same(task, run_dir, whole_run)


@pytest.mark.parametrize(
    ("step", "phase", "overrides"),
    # Checkpoints are written in the background: step 3 runs while the checkpoint of step 2 is written.
    [(2, "checkpointing", ("checkpoint.async_save=true", "checkpoint.every_steps=1")), (4, "updating", ())],
)
@pytest.mark.on_demand  # test_stops also resumes
def test_a_killed_driver_leaves_nothing_running_and_resume_repeats_nothing(
    task: Path, whole_run: Path, tmp_path: Path, step: int, phase: str, overrides: tuple[str, ...]
) -> None:
    run_dir = tmp_path / "run"
    with TrainProcess(task, run_dir, overrides) as run:
        run.wait_until(in_step(run, step, phase))
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        assert not run.left_after(SECONDS_TO_END)
        assert no_segment_is_left()
    if overrides:
        assert (run_dir / "checkpoints" / "step_1" / "complete.json").exists()
    assert run.sessions()
    assert_resumes_to_the_same(task, run_dir, whole_run)
    assert not run.sessions()
