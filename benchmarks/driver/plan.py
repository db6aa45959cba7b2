"""Duration and memory of `mcore-rl plan` for the 671B recipe with 512 trainer ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.children import ChildError
from benchmarks.result import Result

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "dapo_deepseek_v3_671b.yaml"
LIMIT_SECONDS, LIMIT_BYTES = 60.0, 2 * 2**30


def run() -> list[Result]:
    started = time.perf_counter()
    command = [sys.executable, "-m", "mcore_rl.cli", "plan", str(RECIPE), "--json"]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if not said:
            errors.seek(0)
            raise ChildError(f"mcore-rl plan ended with code {process.returncode}:\n{errors.read().strip()}")
    seconds, peak = time.perf_counter() - started, used.ru_maxrss * 1024
    sync = json.loads(said)["weight_sync"]
    needed, floor = sync["bytes_per_engine_rank"], sync["floor_bytes_per_engine_rank"]
    note = f"an engine rank receives {needed / 1e9:.1f} GB, {needed / floor:.3f} times the lower bound"
    return [
        Result("wall clock, start of Python included", seconds, LIMIT_SECONDS, "s", seconds / LIMIT_SECONDS, "<= 1.0"),
        Result("its memory", peak / 2**20, LIMIT_BYTES / 2**20, "MiB", peak / LIMIT_BYTES, "<= 1.0", note),
    ]
