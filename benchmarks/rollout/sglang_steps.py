"""SGLang stepped by our loop, compared with its own Engine and HTTP server: the same requests, 64 at a time.

The model is tiny, in float32, so that overhead dominates a step. The unit is CPU seconds of all processes of a variant,
including its client. Variants alternate; the waiting ones are suspended, because SGLang's own loops spin. Engine and
server do not stream, so they return less often than our loop, which returns every token after its step.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import psutil

from benchmarks.children import LineProgram
from benchmarks.isolation import ROOT
from benchmarks.result import Result, SkippedError
from benchmarks.rollout.engine_loop import requests, write_model
from benchmarks.sizes import size
from mcore_rl.config.rules.engine_support import SGLANG_VERSION, sglang_python, sglang_version

ROUNDS = size(5, 1)
AIMS = {"engine": ("its Engine", ">= 1.0"), "server": ("its HTTP server", ">= 1.1")}
"""Other variant -> its name in the table, and the target ratio of our rate to its rate."""


def run() -> list[Result]:
    if sglang_version() != SGLANG_VERSION:
        raise SkippedError("needs .venv-sglang: make sglang")
    with tempfile.TemporaryDirectory(prefix="mcore_rl_sglang_") as directory:
        model = write_model(directory)
        task = Path(directory) / "requests.json"
        task.write_text(
            json.dumps([(r.token_ids.tolist(), r.sampling.max_response_tokens, r.seed) for r in requests()])
        )
        sides = {way: _SglangVariant(way, model, task) for way in ("ours", *AIMS)}
        try:
            rounds = [{way: side.measure() for way, side in sides.items()} for _ in range(ROUNDS + 1)][1:]
        finally:
            for side in sides.values():
                side.end()
    return [_row(rounds, way, beside, aim) for way, (beside, aim) in AIMS.items()]


def _row(rounds: list[dict[str, float]], way: str, beside: str, aim: str) -> Result:
    ratio = statistics.median(each["ours"] / each[way] for each in rounds)
    limit = statistics.median(each[way] for each in rounds)
    return Result(f"SGLang stepped by us, beside {beside}", ratio * limit, limit, "tok/CPU s", ratio, aim)


class _SglangVariant:
    """Processes of one variant. Each measurement runs all requests."""

    def __init__(self, way: str, model: str, task: Path) -> None:
        python = sys.executable if way == "ours" else str(sglang_python())
        command = [python, "-m", "benchmarks.rollout.sglang_side", way, model, str(task)]
        self._program = LineProgram(f"the process of {way}", command, ROOT)

    def measure(self) -> float:
        """Return tokens per CPU second."""
        for process in self._processes():
            process.resume()
        before = self._cpu_seconds()  # exclude start and warm-up
        tokens = self._program.ask()["tokens"]
        seconds = self._cpu_seconds() - before
        # SGLang's schedulers spin while they have nothing to do, which would slow the next variant down.
        for process in self._processes():
            process.suspend()
        return tokens / seconds

    def _processes(self) -> list[psutil.Process]:
        process = psutil.Process(self._program.pid)
        return [process, *process.children(recursive=True)]

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes()]
        return sum(spent.user + spent.system for spent in times)

    def end(self) -> None:
        for process in self._processes():  # SGLang's schedulers, too
            process.kill()
        self._program.kill()
