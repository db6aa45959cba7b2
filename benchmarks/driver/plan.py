"""Duration and memory of `mcore-rl plan` for the 671B recipe with 512 trainer ranks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

from benchmarks.children import ChildError
from benchmarks.isolation import ROOT
from benchmarks.result import Result, compare

RECIPE = ROOT / "configs" / "dapo_deepseek_v3_671b.yaml"
LIMIT_SECONDS, LIMIT_BYTES = 60.0, 2 * 2**30


def run() -> list[Result]:
    command = [sys.executable, "-m", "mcore_rl.cli", "plan", str(RECIPE), "--json"]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if not done.stdout:  # a plan that does not fit exits with 1, but prints its numbers
        raise ChildError(f"mcore-rl plan ended with code {done.returncode}:\n{done.stderr.strip()}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # the plan is the only child
    sync = json.loads(done.stdout)["weight_sync"]
    needed, floor = sync["bytes_per_engine_rank"], sync["floor_bytes_per_engine_rank"]
    note = f"an engine rank receives {needed / 1e9:.1f} GB, {needed / floor:.3f} times the lower bound"
    return [
        compare("wall clock, start of Python included", seconds, LIMIT_SECONDS, "s", "<= 1.0"),
        compare("its memory", peak / 2**20, LIMIT_BYTES / 2**20, "MiB", "<= 1.0", note),
    ]
