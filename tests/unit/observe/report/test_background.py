"""Reports during a run: a process of their own, which neither delays nor survives the run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from mcore_rl.observe.report.background import ReportProcess
from tests.recorded_run import write_run


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_report_process_writes_when_due(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    process = ReportProcess(directory, directory / "logs", every_steps=2)
    for step in (0, 1):
        process.step_finished(step)
        assert process._process is None
    process.step_finished(2)
    assert process._process is not None
    assert os.getpriority(os.PRIO_PROCESS, process._process.pid) == 19
    wait_for(directory / "report.html")
    process.close()


def test_report_process_still_writing_skips_the_next(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    process = ReportProcess(directory, directory / "logs", every_steps=1)
    process.step_finished(1)
    first = process._process
    process.step_finished(2)
    assert process._process is first
    process.close()
    assert process._process is None
    assert [path.name for path in directory.glob(".report*")] == []


def test_report_process_interval_0_starts_nothing(tmp_path: Path) -> None:
    process = ReportProcess(tmp_path, tmp_path / "logs", every_steps=0)
    process.step_finished(100)
    process.close()
    assert list(tmp_path.iterdir()) == []
