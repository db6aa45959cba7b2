"""Runs a benchmark in its own process; a crash or hang becomes part of the outcome."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.registry import Benchmark
from benchmarks.result import Outcome, Result, SkippedError

ROOT = Path(__file__).resolve().parents[1]
GRACE_SECONDS = 20.0
"""Time between SIGTERM and SIGKILL after a timeout, in which the benchmark ends its own children."""


def run_isolated(name: str, benchmark: Benchmark) -> Outcome:
    """Run a benchmark and return its outcome. Its output goes to stderr.

    No process of the benchmark outlives this call. GPUs are hidden unless the benchmark needs one.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mcore_rl_bench_") as directory:
        answer = Path(directory) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.isolation", benchmark.module, str(answer)]
        environment = dict(os.environ) if benchmark.gpu else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, env=environment)
        try:
            code = process.wait(benchmark.timeout_seconds)
        except subprocess.TimeoutExpired:
            return Outcome(name, reason=f"still running after {benchmark.timeout_seconds} s", seconds=_since(started))
        finally:
            _end(process)
        if not answer.exists():
            return Outcome(name, reason=_how_it_ended(code), seconds=_since(started))
        return _outcome(name, json.loads(answer.read_text(encoding="utf-8")), _since(started))


def _since(started: float) -> float:
    return time.monotonic() - started


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}; its output is above"
    return f"its process ended with code {code}; its output is above"


def _outcome(name: str, answer: dict[str, Any], seconds: float) -> Outcome:
    results = tuple(Result(**fields) for fields in answer.get("results", ()))
    return Outcome(name, results, answer.get("reason", ""), answer.get("skipped", False), seconds)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a running process and its descendants."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
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


def _answer(module: str) -> dict[str, Any]:
    """Run a benchmark. Returns its results, or the reason for their absence."""
    try:
        return {"results": [asdict(result) for result in importlib.import_module(module).run()]}
    except SkippedError as reason:
        return {"reason": str(reason), "skipped": True}
    except Exception as error:  # process boundary: the table contains the cause, stderr the traceback
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        return {"reason": f"{type(error).__name__}: {lines[-1]}"}


def main(arguments: list[str]) -> None:
    module, path = arguments
    answer = _answer(module)
    temporary = Path(path).with_suffix(".tmp")
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
