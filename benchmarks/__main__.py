"""`make bench`: run all benchmarks, or those named, and print one table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.isolation import ROOT, run_isolated
from benchmarks.machine import look, num_gpus
from benchmarks.registry import BENCHMARKS
from benchmarks.result import NO_GPU, BenchmarkOutcome, Machine
from benchmarks.sizes import SMALLEST
from benchmarks.table import render
from model_converters.durable_files import durable_write


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if a benchmark failed. A missed target and a missing peer or GPU are not failures."""
    options = _options(arguments)
    # Before any benchmark imports torch; child processes inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.smallest:
        os.environ[SMALLEST] = "1"
    names = options.names or [name for name, benchmark in BENCHMARKS.items() if benchmark.gpu or not options.gpu]
    outcomes = [run_benchmark(name) for name in names]
    machine = look(gpu=any(BENCHMARKS[outcome.benchmark].gpu for outcome in outcomes if outcome.results))
    print(render(machine.line, outcomes))
    measured = any(outcome.results for outcome in outcomes)
    for path in [options.json, results_path(machine) if options.save and measured else None]:
        if path is not None:
            write_json(path, machine, outcomes)
            print(f"\nresults: {path}")
    # A machine that is busy or slower misses targets, so only benchmarks that did not finish are errors.
    return int(any(outcome.reason and not outcome.skipped for outcome in outcomes))


def run_benchmark(name: str) -> BenchmarkOutcome:
    """Run one benchmark in a process of its own; skip it if it needs a GPU that is missing."""
    benchmark = BENCHMARKS[name]
    if benchmark.gpu and not num_gpus():
        return BenchmarkOutcome(name, reason=NO_GPU, skipped=True)
    print(f"{name}: {benchmark.about} ...", file=sys.stderr, flush=True)
    outcome = run_isolated(name, benchmark)
    print(f"{name}: {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
    return outcome


def write_json(
    path: Path,
    machine: Machine,
    outcomes: Sequence[BenchmarkOutcome],
    tests: Sequence[Mapping[str, object]] = (),
) -> None:
    """Write all results, with a description of the machine. `tests`: outcomes of GPU tests, which are left out if there
    are none."""
    about = {name: value for name, value in asdict(machine).items() if name in ("device", "driver", "versions")}
    content = {"machine": machine.line, **about, "benchmarks": [_as_json(outcome) for outcome in outcomes]}
    if tests:
        content["tests"] = list(tests)
    path.parent.mkdir(parents=True, exist_ok=True)
    with durable_write(path) as file:
        file.write(json.dumps(content, indent=1, default=float).encode())  # float: numpy numbers


def _as_json(outcome: BenchmarkOutcome) -> dict[str, object]:
    results = [{**asdict(result), "met": result.met} for result in outcome.results]
    return {**asdict(outcome), "results": results}


def results_path(machine: Machine) -> Path:
    """Return the file of this day's results on this device."""
    return ROOT / "benchmarks" / "results" / f"{machine.date}-{machine.slug}.json"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    listed = "\n".join(f"  {name:<18} {benchmark.about}" for name, benchmark in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"benchmarks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--gpu", action="store_true", help="without names: run the benchmarks that need a GPU")
    parser.add_argument(
        "--smallest", action="store_true", help="smallest sizes, as a smoke test; the results have no meaning"
    )
    parser.add_argument(
        "--save", action="store_true", help="also write the results to benchmarks/results/<date>-<device>.json"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(BENCHMARKS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
