"""GPU benchmarks run without a GPU: each returns rows at a tiny size on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.registry import BENCHMARKS
from tests.readme import ROOT


def test_gpu_benchmarks_on_cpu_return_rows() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [line.partition(": ")[0] for line in done.stdout.splitlines() if line.startswith("gpu_") and "  " in line]
    wanted = {name for name, benchmark in BENCHMARKS.items() if benchmark.gpu}
    assert set(rows) == wanted
    assert len(rows) >= 10
