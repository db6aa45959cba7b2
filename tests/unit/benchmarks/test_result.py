"""The table reports measurements correctly: aims, missing peers, and processes that fail, hang or leave something
behind."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks import isolation
from benchmarks.__main__ import write_json
from benchmarks.registry import BENCHMARKS, Benchmark
from benchmarks.result import BenchmarkOutcome, Machine, Result, compare, shares
from benchmarks.table import render

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("ratio", "aim", "met"),
    [
        (0.45, ">= 0.45", True),
        (0.449, ">= 0.45", False),
        (1.3, "<= 1.3", True),
        (1.31, "<= 1.3", False),
        (9.0, "", None),
    ],
)
def test_an_aim_bounds_the_ratio_and_includes_its_limit(ratio: float, aim: str, met: bool | None) -> None:
    assert Result("name", 1.0, 1.0, "s", ratio, aim).met is met


@pytest.mark.parametrize("aim", ["1.3", "< 1.3", "<= fast", "<=1.3"])
def test_an_aim_that_cannot_be_checked_is_refused(aim: str) -> None:
    with pytest.raises(ValueError, match=r"aim|could not convert"):
        Result("name", 1.0, 1.0, "s", 1.0, aim)


def test_shares_name_what_the_parts_leave_of_the_whole() -> None:
    assert shares([("a", 0.25), ("b", 0.5)], 1.0) == "a 250.0 ms (25%), b 500.0 ms (50%), rest 250.0 ms (25%)"


def test_every_outcome_appears_in_the_table() -> None:
    outcomes = [
        BenchmarkOutcome("good", (Result("row", 0.5, 2.0, "s", 0.25, "<= 1", "here it goes\nand there"),)),
        BenchmarkOutcome("slow", (Result("row", 3.0, 2.0, "GB/s", 1.5, "<= 1"),)),
        BenchmarkOutcome("absent", reason="no peer", skipped=True),
        BenchmarkOutcome("broken", reason="it broke"),
    ]
    text = render("machine", outcomes)
    good, slow = (line for line in text.splitlines() if ": row  " in line)
    assert good.split() == ["good:", "row", "0.500", "s", "2.000", "s", "0.250", "<=", "1", "yes"]
    assert slow.split() == ["slow:", "row", "3.000", "GB/s", "2.000", "GB/s", "1.500", "<=", "1", "NO"]
    assert "here it goes\n    and there" in text
    assert "absent: skipped: no peer" in text
    assert "broken: FAILED: it broke" in text


def test_json_has_machine_and_numpy_numbers(tmp_path: Path) -> None:
    machine = Machine("2026-01-02", "x86_64", 8, 0.5, "1", "NVIDIA H100 80GB HBM3", "570.1", {"torch": "2.13.0"})
    outcome = BenchmarkOutcome("b", (compare("row", np.int64(3), np.float32(2.0), "s", "<= 1"),))
    write_json(tmp_path / "results.json", machine, [outcome])
    written = json.loads((tmp_path / "results.json").read_text())
    ((row,),) = (each["results"] for each in written["benchmarks"])
    assert (row["ours"], row["limit"], row["ratio"], row["met"]) == (3, 2, 1.5, False)
    assert (written["device"], written["driver"], written["versions"]) == (machine.device, "570.1", {"torch": "2.13.0"})
    assert written["machine"] == machine.line
    assert "H100" in machine.line
    assert machine.slug == "nvidia-h100-80gb-hbm3"
    assert replace(machine, device="cpu").slug == "cpu"


def test_every_registered_benchmark_has_its_module() -> None:
    for benchmark in BENCHMARKS.values():
        assert (ROOT / f"{benchmark.module.replace('.', '/')}.py").is_file()


@pytest.fixture
def write_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a module with the given body of `run` and return it as a benchmark."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(body: str, timeout_seconds: int = 30) -> Benchmark:
        source = "from benchmarks.result import Result, SkippedError\n\ndef run():\n" + textwrap.indent(body, "    ")
        (tmp_path / "written_benchmark.py").write_text(source)
        return Benchmark("written_benchmark", timeout_seconds, "written by a test")

    return write


def test_results_come_back_from_the_other_process_unchanged(write_benchmark) -> None:
    outcome = isolation.run_isolated("b", write_benchmark("return [Result('n', 0.1, 0.2, 'ms', 0.5, '<= 1', 'note')]"))
    assert outcome.results == (Result("n", 0.1, 0.2, "ms", 0.5, "<= 1", "note"),)
    assert not outcome.reason


@pytest.mark.parametrize(
    ("body", "skipped", "reason"),
    [
        ("raise SkippedError('the peer is absent')", True, "the peer is absent"),
        ("raise ValueError('first line\\nthe cause')", False, "ValueError: the cause"),
        ("import os; os._exit(7)", False, "code 7"),
        ("import os; os.kill(os.getpid(), 9)", False, "SIGKILL"),
    ],
)
def test_a_benchmark_that_cannot_finish_is_a_reason_not_an_end(
    write_benchmark, body: str, skipped: bool, reason: str
) -> None:
    outcome = isolation.run_isolated("b", write_benchmark(body))
    assert outcome.results == ()
    assert outcome.skipped is skipped
    assert reason in outcome.reason


def test_a_benchmark_that_hangs_is_ended_with_all_that_it_started(
    write_benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "GRACE_SECONDS", 0.5)
    pid_file = tmp_path / "pid"
    body = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pid_file)!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    outcome = isolation.run_isolated("b", write_benchmark(body, timeout_seconds=3))
    assert "after 3 s" in outcome.reason
    deadline = time.monotonic() + 60
    while _lives(int(pid_file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(int(pid_file.read_text()))


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.__main__ import main

    with pytest.raises(SystemExit) as refusal:
        main(["no_such_benchmark"])
    assert refusal.value.code == 2
    assert "packing" in capsys.readouterr().err
    assert "no_such_benchmark" not in sys.modules
