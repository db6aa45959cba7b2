"""`python -m benchmarks.gpu`: smoke test of all GPU benchmarks with a tiny size on the CPU. The results have no
meaning; `python -m benchmarks --gpu` measures."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace

from benchmarks.gpu.models import TINY, TINY_MOE
from benchmarks.registry import BENCHMARKS
from benchmarks.result import BenchmarkOutcome
from benchmarks.table import render

SIZES: dict[str, dict[str, object]] = {
    "gpu_updates": {"sizes": (TINY, TINY_MOE), "edge": 256},
    "gpu_memory": {"sizes": (TINY, replace(TINY_MOE, recompute="full"))},
    "gpu_logprobs": {"tokens": 256, "hidden": 64, "vocabulary": 1000},
    "gpu_host_optimizer": {"size": TINY, "piece_bytes": 1 << 20},
    "gpu_handover": {"layers": 1, "rounds": 2},
    "gpu_ipc": {"num_bytes": 1 << 20},
}


def main() -> None:
    """Run all benchmarks and print a table. Errors propagate."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    outcomes = []
    for name, benchmark in BENCHMARKS.items():
        if benchmark.gpu:
            results = importlib.import_module(benchmark.module).run("cpu", **SIZES[name])
            outcomes.append(BenchmarkOutcome(name, tuple(results)))
    print(render("tiny sizes on a CPU", outcomes))


if __name__ == "__main__":
    main()
