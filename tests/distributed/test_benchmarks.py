"""Every benchmark runs at its smallest size."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from benchmarks.registry import BENCHMARKS
from benchmarks.sizes import SMALLEST
from tests.distributed import converting
from tests.distributed.launch import fork_children
from tests.readme import ROOT
from tests.selection import on_demand_unless

GROUPS = {
    "engines": ("engine_loop", "episodes"),
    "drafts": ("drafts",),
    "gateway": ("gateway",),
    "sglang": ("sglang_steps", "sglang_schedules"),
    "runs": ("async_step", "whole_step"),
}
"""Benchmarks that need processes with their own imports; `python -m benchmarks` runs them."""
LONG = ("engines", "drafts", "gateway", "sglang", "runs")
"""Groups that start engines, five SGLang processes or four whole runs: on demand."""
FORKED = [
    name
    for name, benchmark in BENCHMARKS.items()
    if not benchmark.gpu and all(name not in group for group in GROUPS.values())
]
"""Benchmarks that run in a fork of a process that has imported torch and megatron-core; their children fork too."""
PEERS = {
    "delta_link": "needs root and network namespaces",
    "mbridge": "scripts/setup_mbridge.sh",
    "refit": "scripts/setup_mbridge.sh",
    "sglang_steps": "make sglang",
    "sglang_schedules": "make sglang",
    "whole_step": "scripts/setup_trl.sh",
}
"""Command that installs the peer of a benchmark, or what else it needs; without it the benchmark is skipped."""


def _run(name: str) -> int | str:
    """Return the number of rows, or the reason for a skipped benchmark."""
    fork_children()
    os.environ[SMALLEST] = "1"
    from benchmarks.result import SkippedError

    benchmark: Any = importlib.import_module(BENCHMARKS[name].module)
    if name == "driver":
        from benchmarks.driver import ray_ranks

        ray_ranks.PROCESSES = 1
    elif name == "mbridge":  # the process groups of this process do not survive a fork
        from benchmarks import pairs

        pairs.peak_bytes = lambda make, arguments, side: pairs.peak_increase(getattr(make(*arguments), side))
    elif name == "plan":
        benchmark.RECIPE = ROOT / "configs" / "qwen3_30b_a3b.yaml"
    try:
        return len(benchmark.run())
    except SkippedError as reason:
        return str(reason)


def _run_for_gpus() -> str:
    fork_children()
    from benchmarks.gpu.__main__ import main

    with redirect_stdout(StringIO()) as output:
        main()
    return output.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=on_demand_unless(name not in ("driver", "async_driver"))) for name in FORKED]
)
def test_benchmark_at_smallest_size_returns_rows(name: str) -> None:
    found = converting.alone(_run, name)
    assert PEERS[name] in found if isinstance(found, str) else found > 0


@pytest.mark.slow
def test_gpu_benchmarks_on_cpu_return_rows() -> None:
    lines = converting.alone(_run_for_gpus).splitlines()
    rows = [line.partition(": ")[0] for line in lines if line.startswith("gpu_") and "  " in line]
    assert set(rows) == {name for name, benchmark in BENCHMARKS.items() if benchmark.gpu}
    assert len(rows) >= 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=pytest.mark.on_demand if group in LONG else ()) for group in GROUPS]
)
def test_benchmarks_command_at_smallest_size_returns_rows(group: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--smallest", "--json", str(path), *GROUPS[group]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    outcomes = {outcome["benchmark"]: outcome for outcome in json.loads(path.read_text())["benchmarks"]}
    assert list(outcomes) == list(GROUPS[group])
    for name, outcome in outcomes.items():
        if outcome["skipped"]:
            assert PEERS[name] in outcome["reason"]
        else:
            assert outcome["results"]
