"""The death of a process ends the run within 30 s with an error that names it, leaves no processes or shared memory,
and loses no checkpoint."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mcore_rl.weights.transports.hosts import remove_abandoned
from mcore_rl.weights.transports.segments import SHARED_MEMORY
from tests.e2e.runs import TrainProcess, metrics, train

pytestmark = pytest.mark.slow

SECONDS_TO_END = 30


def in_step(run: TrainProcess, step: int, phase: str) -> Callable[[], bool]:
    """Return a function that checks by files and process titles whether `step` is in `phase`."""
    rollouts = run.run_dir / "rollouts"
    if phase == "generating":
        calling = in_call(run, "ray::EngineProcess", "run")

        def generating() -> bool:
            # Call calling() before searching the output: finding processes can take longer than a step.
            text = run.text()
            there = "sending the initial weights to the engines" in text
            return there and calling() and re.search(rf"step +{step - 1}/", text) is not None

        return generating
    if phase == "updating":
        calling = in_call(run, "ray::TrainerProcess", "update")
        return lambda: (rollouts / f"step_{step}.jsonl").exists() and calling()
    if phase == "checkpointing":
        return lambda: (run.run_dir / "checkpoints" / f".step_{step}.partial").exists()
    raise ValueError(phase)


def in_call(run: TrainProcess, kind: str, method: str) -> Callable[[], bool]:
    """Return a function that checks whether a process of this kind is executing the method.

    Calls last 0.1 s, so the processes are found once and only their titles are read afterwards, until one dies.
    """
    known: list[psutil.Process] = []

    def calling() -> bool:
        known.extend([] if known else run.processes(kind))
        try:
            return any(f"{kind}.{method}" in " ".join(process.cmdline()) for process in known)
        except psutil.Error:
            known.clear()
            return False

    return calling


def no_segment_is_left() -> bool:
    """Return whether there is no shared-memory segment of a dead process."""
    return remove_abandoned(SHARED_MEMORY) == []


def assert_resumes_to_the_same(task: Path, run_dir: Path, whole_run: Path, *overrides: str) -> None:
    train(task, run_dir, *overrides)
    assert metrics(run_dir) == metrics(whole_run)
    assert not list((run_dir / "rollouts").glob(".*"))
    json.loads((run_dir / "timeline.json").read_text())
    steps = sorted(path.name for path in (run_dir / "rollouts").iterdir())
    assert steps == sorted(path.name for path in (whole_run / "rollouts").iterdir())
    for name in steps:
        assert (run_dir / "rollouts" / name).read_text() == (whole_run / "rollouts" / name).read_text()


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
