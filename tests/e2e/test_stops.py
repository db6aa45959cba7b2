"""Signals that end a run before its step is finished: it ends soon, leaves nothing behind, and says how to continue.

USR2 writes stacks and ends nothing.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.runs import ONE_RANK, TrainProcess, in_step
from tests.e2e.test_failures import assert_stopped

pytestmark = pytest.mark.slow

FROM_THE_BEGINNING = "stopped: no checkpoint; the same command starts from the beginning"
SLOW_REWARD = """
import pathlib
import time

def slow(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if pathlib.Path({metrics!r}).exists():
        time.sleep(600)
    return 0.0
"""
"""Reward function with which the first step never ends; the validation before it does."""


def test_term_to_the_whole_group_in_start_up_ends_it(task: Path, tmp_path: Path) -> None:
    with TrainProcess(task, tmp_path / "run", ONE_RANK) as run:
        run.wait_until(lambda: run.processes("gcs_server"))
        os.killpg(run.process.pid, signal.SIGTERM)
        assert_stopped(run, 143, FROM_THE_BEGINNING)


@pytest.mark.on_demand  # tests/unit/runtime; the first test stops a run
def test_usr2_writes_stacks_of_all_processes_then_second_int_ends_run(task: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_REWARD.format(metrics=str(tmp_path / "run" / "metrics.jsonl")))
    long_step = (f"reward.function={tmp_path / 'slow.py'}:slow", "reward.timeout_seconds=600", *ONE_RANK)
    logs = tmp_path / "run" / "logs" / "attempt_1"
    with TrainProcess(task, tmp_path / "run", long_step) as run:
        run.wait_until(in_step(run, 1, "generating"))
        run.process.send_signal(signal.SIGUSR2)
        for name, function in (("driver", "wait"), ("trainer_rank_0", "main_loop"), ("rollout_engine_0", "serve")):
            file = logs / f"{name}.stacks"
            run.wait_until(lambda file=file, function=function: file.is_file() and function in file.read_text())

        def has_user_function() -> bool:
            """Request stacks again, because grading may begin after the first request."""
            run.process.send_signal(signal.SIGUSR2)
            time.sleep(1)  # the driver looks twice a second
            # Grading processes are children of the engine.
            return any("in slow" in path.read_text() for path in logs.glob("rollout_engine_0_*.stacks"))

        run.wait_until(has_user_function)
        assert run.process.poll() is None
        os.killpg(run.process.pid, signal.SIGINT)
        run.wait_until(lambda: "finishing step 1" in run.text())
        time.sleep(1.5)  # an earlier second signal counts as the same stop
        os.killpg(run.process.pid, signal.SIGINT)
        assert_stopped(run, 130, FROM_THE_BEGINNING)
