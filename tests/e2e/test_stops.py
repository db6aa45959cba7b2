"""SIGINT and SIGTERM to a run's processes: the run finishes and saves the current step if possible.

In every case it ends soon, leaves nothing behind, and prints how to continue.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import ONE_RANK, SECONDS_TO_END, TrainProcess, in_step, metrics, no_segment_is_left
from tests.e2e.test_failures import assert_resumes_to_the_same

pytestmark = pytest.mark.slow

SLOW_REWARD = """
import pathlib
import time

def slow(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if pathlib.Path({metrics!r}).exists():
        time.sleep(600)
    return 0.0
"""


def assert_ended(run: TrainProcess, code: int, last_line: str) -> None:
    assert run.finish(SECONDS_TO_END) == code, run.text()[-4000:]
    assert "Traceback" not in run.text(), run.text()[-4000:]
    assert run.text().splitlines()[-1] == last_line
    assert not run.left_after(10)
    assert no_segment_is_left()


@pytest.fixture
def long_step(tmp_path: Path) -> tuple[str, ...]:
    """Overrides with which the first step never ends; the validation before it does."""
    (tmp_path / "slow.py").write_text(SLOW_REWARD.format(metrics=str(tmp_path / "run" / "metrics.jsonl")))
    return (f"reward.function={tmp_path / 'slow.py'}:slow", "reward.timeout_seconds=600", *ONE_RANK)


def test_term_to_every_process_saves_step_and_resume_repeats_nothing(
    task: Path, whole_run: Path, tmp_path: Path
) -> None:
    """The signal also reaches Ray's and the graders' processes, as from a scheduler that signals a cgroup."""
    run_dir = tmp_path / "run"
    with TrainProcess(task, run_dir, ("checkpoint.every_steps=0",)) as run:
        (engine,) = run.wait_until(lambda: run.processes("ray::EngineProcess"))
        run.wait_until(in_step(run, 2, "generating"))
        engine.suspend()  # otherwise the step would end before the checks below
        assert run.listens_at() == {"127.0.0.1"}
        assert not [name for name in ("dashboard.py", "monitor.py") if run.processes(name)]
        assert [stat.S_IMODE(path.stat().st_mode) for path in (*run.sessions(), run_dir)] == [0o700, 0o700]
        for process in [run.process, *run.processes()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        said = run.wait_until(lambda: re.search(r"finishing step (\d), then saving; a second signal stops", run.text()))
        step = int(said[1])  # 2, or 3 if step 2 had ended
        engine.resume()
        assert_ended(run, 143, f"stopped on request: step {step} is saved; the same command resumes from it")
        assert not run.sessions()
    assert max(metrics(run_dir)) == step < 4
    assert_resumes_to_the_same(task, run_dir, whole_run)


def test_a_term_to_the_whole_group_in_start_up_ends_it(task: Path, tmp_path: Path) -> None:
    with TrainProcess(task, tmp_path / "run", ONE_RANK) as run:
        run.wait_until(lambda: run.processes("gcs_server"))
        os.killpg(run.process.pid, signal.SIGTERM)
        assert_ended(run, 143, "stopped: no checkpoint; the same command starts from the beginning")


def test_stops_second_signal_interrupts(task: Path, tmp_path: Path, long_step: tuple[str, ...]) -> None:
    with TrainProcess(task, tmp_path / "run", long_step) as run:
        run.wait_until(in_step(run, 1, "generating"))
        os.killpg(run.process.pid, signal.SIGINT)
        run.wait_until(lambda: "finishing step 1" in run.text())
        time.sleep(1.5)  # an earlier second signal counts as the same stop
        os.killpg(run.process.pid, signal.SIGINT)
        assert_ended(run, 130, "stopped: no checkpoint; the same command starts from the beginning")
