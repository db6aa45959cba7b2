"""The run directory during a run: locked against other runs, and deleted by the user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.runtime.isolation.namespace import can_enter, current
from tests.e2e.runs import SUPERVISED, TrainProcess, metrics

pytestmark = pytest.mark.slow

ISOLATED = ("cluster.isolation=namespace",) if can_enter() else ()
"""The run has its own network namespace if the host allows it."""


def test_run_dir_in_use_rejects_other_runs_and_its_deletion_ends_the_run(task: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    overrides = (*SUPERVISED, "trainer.steps=10000", "checkpoint.every_steps=0", *ISOLATED)
    with TrainProcess(task, run_dir, overrides) as run:
        run.wait_until(lambda: (run_dir / "run.lock").exists() and "starting Ray" in run.text())
        for verb in ("train", "eval"):
            command = [sys.executable, "-m", "mcore_rl.cli", verb, str(task), f"run.dir={run_dir}", "trainer.steps=2"]
            second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            assert second.returncode == 2, second.stderr
            assert second.stderr.startswith(f"error: run.dir={run_dir} is in use by process {run.process.pid} on host ")
            assert len(second.stderr.splitlines()) == 1
        if ISOLATED:
            run.wait_until(lambda: run.processes("ray::TrainerProcess"))
            networks = {os.readlink(f"/proc/{process.pid}/ns/net") for process in run.processes()}
            assert len(networks) == 1
            assert networks != {current()}
        run.wait_until(lambda: (run_dir / "metrics.jsonl").exists() and len(metrics(run_dir)) > 1)
        assert not list(run_dir.glob("config.*.yaml"))  # the rejected starts wrote no configuration
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.rmtree(run_dir, ignore_errors=True)
        assert run.finish(30) == 1, run.text()[-4000:]
        assert "Traceback" not in run.text(), run.text()[-4000:]
        assert f"run.dir={run_dir} was deleted" in run.text().splitlines()[-1]
        assert not run.left_after(10)
