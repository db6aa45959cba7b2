"""Every benchmark runs at its smallest size; GPU benchmarks are in test_gpu_benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.registry import BENCHMARKS
from tests.readme import ROOT

GROUPS = {
    "tensors": ("packing", "routing", "advantages", "losses", "logprobs", "transforms", "convert", "plan"),
    "ranks": ("actor", "pipeline", "handover", "network", "mbridge", "refit"),
    "ray": ("driver", "async_driver"),
    "engines": ("engine_loop", "episodes"),
    "sglang": ("sglang_steps",),
    "runs": ("async_step", "whole_step"),
}
LONG = ("sglang", "runs")
"""Groups that start three SGLang processes or four whole runs; they take minutes instead of seconds."""
PEERS = {
    "mbridge": "scripts/setup_mbridge.sh",
    "refit": "scripts/setup_mbridge.sh",
    "sglang_steps": "make sglang",
    "whole_step": "scripts/setup_trl.sh",
}
"""Command that installs the peer of a benchmark; without the peer the benchmark is skipped."""


def test_benchmark_groups_contain_every_benchmark_once() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(name for name, benchmark in BENCHMARKS.items() if not benchmark.gpu)


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=pytest.mark.on_demand if group in LONG else ()) for group in GROUPS]
)
def test_benchmarks_at_smallest_size_return_rows(group: str, tmp_path: Path) -> None:
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
