"""Runs a benchmark in its own process; a crash or hang becomes part of the outcome."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks.registry import Benchmark
from benchmarks.result import BenchmarkOutcome, SkippedError

ROOT = Path(__file__).resolve().parents[1]
GRACE_SECONDS = 20.0
"""Time between SIGTERM and SIGKILL after a timeout, in which the benchmark ends its own children."""


def run_isolated(name: str, benchmark: Benchmark) -> BenchmarkOutcome:
    """Run a benchmark and return its outcome. Its output goes to stderr.

    No process of the benchmark outlives this call. GPUs are hidden unless the benchmark needs one.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mcore_rl_bench_") as directory:
        answer = Path(directory) / "answer.pickle"
        command = [sys.executable, "-m", "benchmarks.isolation", name, benchmark.module, str(answer)]
        environment = dict(os.environ) if benchmark.gpu else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        # stdout contains only the table.
        process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, env=environment)
        try:
            code = process.wait(benchmark.timeout_seconds)
            outcome = pickle.loads(answer.read_bytes()) if answer.exists() else _without_answer(name, code)
        except subprocess.TimeoutExpired:
            outcome = BenchmarkOutcome(name, reason=f"still running after {benchmark.timeout_seconds} s")
        finally:
            _end(process)
        return replace(outcome, seconds=time.monotonic() - started)


def _without_answer(name: str, code: int) -> BenchmarkOutcome:
    ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return BenchmarkOutcome(name, reason=f"its process {ending}; its output is above")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a running process and its descendants."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)  # before it ends: orphans lose their parent
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


def _answer(name: str, module: str) -> BenchmarkOutcome:
    """Run a benchmark. Returns its results, or the reason for their absence."""
    try:
        return BenchmarkOutcome(name, tuple(importlib.import_module(module).run()))
    except SkippedError as reason:
        return BenchmarkOutcome(name, reason=str(reason), skipped=True)
    except Exception as error:  # process boundary: the table contains the cause, stderr the traceback
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        return BenchmarkOutcome(name, reason=f"{type(error).__name__}: {lines[-1]}")


def main(name: str, module: str, path: str) -> None:
    answer = pickle.dumps(_answer(name, module))
    # Atomic: the answer of a benchmark that is killed meanwhile must not be read.
    temporary = Path(path).with_suffix(".tmp")
    temporary.write_bytes(answer)
    temporary.replace(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
