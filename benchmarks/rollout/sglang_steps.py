"""SGLang stepped by our loop, compared with its own Engine and HTTP server: the same requests, 64 at a time.

The model is tiny, in float32, so that overhead dominates a step. The unit is CPU seconds of all processes of a variant,
including its client. Variants alternate, and the others are stopped meanwhile, because SGLang's own loops spin. Engine
and server do not stream, so they return less than our loop, which returns every token after its step.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import psutil

from benchmarks.children import ErrorFile, run_command
from benchmarks.result import Result, SkippedError
from benchmarks.rollout.engine_loop import requests
from benchmarks.sizes import size
from mcore_rl.config.rules.engine_support import SGLANG_VERSION, sglang_python, sglang_version

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = size(5, 1)
AIMS = {"engine": ("its Engine", ">= 1.0"), "server": ("its HTTP server", ">= 1.1")}


def run() -> list[Result]:
    if sglang_version() != SGLANG_VERSION:
        raise SkippedError("needs .venv-sglang: make sglang")
    with tempfile.TemporaryDirectory(prefix="mcore_rl_sglang_") as name:
        directory = Path(name)
        model = directory / "model"
        command = [sys.executable, str(ROOT / "scripts" / "tiny_checkpoint.py"), "qwen3_moe", str(model)]
        run_command([*command, "--set", "head_dim=32", "--set", "max_position_embeddings=512"], ROOT)
        task = directory / "requests.json"
        task.write_text(
            json.dumps([(r.token_ids.tolist(), r.sampling.max_response_tokens, r.seed) for r in requests()])
        )
        sides = {way: _Side(way, model, task) for way in ("ours", *AIMS)}
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


class _Side:
    """Child process that runs all requests per measurement and returns the number of tokens."""

    def __init__(self, way: str, model: Path, task: Path) -> None:
        self._way = way
        python = sys.executable if way == "ours" else str(sglang_python())
        command = [python, "-m", "benchmarks.rollout.sglang_side", way, str(model), str(task)]
        self._errors = ErrorFile()
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors.file, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asks: IO[str] = self._process.stdin
        self._answers: IO[str] = self._process.stdout

    def measure(self) -> float:
        """Return tokens per CPU second."""
        for process in self._processes():
            process.resume()
        before = self._cpu_seconds()
        self._asks.write("\n")
        self._asks.flush()
        while not (line := self._answers.readline()).startswith("{"):
            if not line:
                raise self._errors.ended(f"the process of {self._way}", self._process)
        seconds = self._cpu_seconds() - before
        for process in self._processes():
            process.suspend()
        tokens: int = json.loads(line)["tokens"]
        return tokens / seconds

    def _processes(self) -> list[psutil.Process]:
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes()]
        return sum(spent.user + spent.system for spent in times)

    def end(self) -> None:
        for process in self._processes():
            process.kill()
        self._process.wait()
