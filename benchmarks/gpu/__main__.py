"""`python -m benchmarks.gpu`: smoke test of all GPU benchmarks with a tiny size on the CPU. The results have no
meaning; `python -m benchmarks --gpu` measures."""

from __future__ import annotations

import importlib
import os

from benchmarks.registry import BENCHMARKS
from benchmarks.result import BenchmarkOutcome
from benchmarks.sizes import SMALLEST
from benchmarks.table import render


def main() -> None:
    """Run all benchmarks and print a table. Errors propagate."""
    # Before any benchmark is imported: sizes are constants of the modules.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", SMALLEST: "1"}
    outcomes = []
    for name, benchmark in BENCHMARKS.items():
        if benchmark.gpu:
            results = importlib.import_module(benchmark.module).run("cpu")
            outcomes.append(BenchmarkOutcome(name, tuple(results)))
    print(render("tiny sizes on a CPU", outcomes))


if __name__ == "__main__":
    main()
