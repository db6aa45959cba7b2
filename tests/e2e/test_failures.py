"""A run that loses its engine or ends amid a step leaves no processes or shared memory, and resumes to the metrics and
records of a run that nothing interrupted.

The tests with processes that die in other phases run on demand.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import stat
import time
from pathlib import Path

import psutil
import pytest

from tests.contract.engines import SGLANG_IS_READY
from tests.e2e.runs import (
    ENGINE,
    SECONDS_TO_END,
    TrainProcess,
    assert_same_records,
    in_step,
    metrics,
    no_segment_is_left,
    train,
)
from tests.e2e.test_engine_loss import (
    COMPARED,
    TAKEN_OVER,
    assert_kept_is_what_is_referred_to,
    engine_of,
    restarts,
    suspend_in_midst_of_responses,
    total,
    without_restarts,
    write_gated_reward,
)
from tests.e2e.test_scored_run import PPO

pytestmark = pytest.mark.slow


def assert_died(run: TrainProcess, named: str, killed: float) -> None:
    """Check that the run ends in time with an error that names the process killed at `killed`, and leaves nothing."""
    assert run.finish(SECONDS_TO_END) == 1, run.text()[-4000:]
    error = next(line for line in run.text().splitlines() if line.startswith("error:"))
    assert re.search(
        rf"{named}( \d)? died: killed by SIGKILL.* \(host \S+, log {run.run_dir}/logs/\S*\.log\)", error
    ), error
    assert not run.left_after(SECONDS_TO_END - (time.monotonic() - killed))
    assert no_segment_is_left()


def assert_resumes_to_the_same(task: Path, run_dir: Path, whole_run: Path, *overrides: str) -> None:
    train(task, run_dir, *overrides)
    assert metrics(run_dir) == metrics(whole_run)
    assert_same_records(run_dir, whole_run)
    assert_no_partial_files(run_dir)


def assert_no_partial_files(run_dir: Path) -> None:
    assert not list((run_dir / "rollouts").glob(".*"))
    assert not (run_dir / "journals").exists()
    json.loads((run_dir / "timeline.json").read_text())


ONE_AT_A_TIME = "rollout.max_concurrent_requests=1"
"""Lengthens the generation of a step from 0.1 to 1.4 s, so that it does not end before the test suspends the engine."""


def lose_the_engine_and_stop(task: Path, run_dir: Path) -> None:
    """The only engine dies amid step 3, starts again, and continues the responses. In the same step, all processes
    receive TERM, also Ray's and the graders', as from a scheduler that signals a cgroup."""
    gated, gate = write_gated_reward(task, run_dir, step=2)  # step 3 does not end before the checks below
    with TrainProcess(
        task, run_dir, ("rollout.max_engine_restarts=1", "checkpoint.every_steps=0", ONE_AT_A_TIME, *gated)
    ) as run:
        first = engine_of(run)
        run.wait_until((run_dir / "rollouts" / "step_1.jsonl").exists)
        suspend_in_midst_of_responses(run, first, step=3)
        assert_kept_is_what_is_referred_to(run_dir)
        first.kill()
        run.wait_until(lambda: first not in run.processes(ENGINE))
        run.wait_until(lambda: "rollout engine 0 is up again, with the weights of version 2" in run.text())
        assert run.listens_at() == {"127.0.0.1"}
        assert not [name for name in ("dashboard.py", "monitor.py") if run.processes(name)]
        assert [stat.S_IMODE(path.stat().st_mode) for path in (*run.sessions(), run_dir)] == [0o700, 0o700]
        for process in [run.process, *run.processes()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        run.wait_until(lambda: "finishing step 3, then saving; a second signal stops" in run.text())
        gate.touch()
        assert_stopped(run, 143, "stopped on request: step 3 is saved; resume with: mcore-rl train ")
        assert not run.sessions()
        log = run_dir / "logs" / "attempt_1" / "rollout_engine_0.log"
        how = rf"rollout engine 0 died: killed by SIGKILL.* \(host \S+, log {re.escape(str(log))}\)"
        assert re.search(rf"warning: {how}; it starts again \(1 of 1 times\)", run.text()), run.text()
    assert (restarts(run_dir), max(metrics(run_dir))) == (1, 3)
    assert total(run_dir, TAKEN_OVER) > 0


def assert_stopped(run: TrainProcess, code: int, last_line: str) -> None:
    assert run.finish(SECONDS_TO_END) == code, run.text()[-4000:]
    assert "Traceback" not in run.text(), run.text()[-4000:]
    assert run.text().splitlines()[-1].startswith(last_line)
    assert not run.left_after(10)
    assert no_segment_is_left()


def test_run_after_a_death_and_a_stop_is_the_whole_run(task: Path, whole_run: Path, tmp_path: Path) -> None:
    """The last step runs on SGLang if it is installed: the same tokens and therefore the same metrics."""
    run_dir = tmp_path / "run"
    lose_the_engine_and_stop(task, run_dir)
    train(task, run_dir, f"rollout.engine={'sglang' if SGLANG_IS_READY else 'vllm'}")
    ours, expected = without_restarts(run_dir), without_restarts(whole_run)
    last, expected_last = ours.pop(4), expected.pop(4)
    assert ours == expected
    assert last["actor/trained_tokens"] == expected_last["actor/trained_tokens"] > 0
    assert {name: last[name] for name in expected_last} == pytest.approx(expected_last, abs=1e-4)
    assert metrics(run_dir)[4][COMPARED] == metrics(whole_run)[4][COMPARED] > 0
    assert_same_records(run_dir, whole_run)
    assert_no_partial_files(run_dir)


@pytest.mark.on_demand  # test_hosts also ends with a dead engine, test_async_run repeats steps after a death
@pytest.mark.parametrize(
    ("victim", "named", "phase", "overrides"),
    [
        ("ray::TrainerProcess", "trainer rank", "updating", ()),
        ("ray::CriticProcess", "critic rank", "generating", PPO),
        (ENGINE, "rollout engine", "updating", ("rollout.max_engine_restarts=0",)),
    ],
)
def test_killed_rank_ends_the_run_by_name_and_resume_repeats_nothing(
    task: Path, tmp_path: Path, victim: str, named: str, phase: str, overrides: tuple[str, ...]
) -> None:
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    train(task, whole, *overrides)
    with TrainProcess(task, run_dir, overrides) as run:
        run.wait_until(in_step(run, 3, phase))
        run.kill_one(victim)
        assert_died(run, named, time.monotonic())
    assert_resumes_to_the_same(task, run_dir, whole, *overrides)


@pytest.mark.parametrize(
    ("step", "phase", "overrides"),
    # Checkpoints are written in the background: step 3 runs while the checkpoint of step 2 is written.
    [(2, "checkpointing", ("checkpoint.async_save=true", "checkpoint.every_steps=1")), (4, "updating", ())],
)
@pytest.mark.on_demand  # test_async_run also kills the driver
def test_killed_driver_leaves_nothing_running_and_resume_repeats_nothing(
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
