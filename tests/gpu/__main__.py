"""`make gpu`: run the GPU tests stage by stage, then the benchmarks of GPUs, and write one JSON file.

Every stage is a process of its own: a broken CUDA context, a crash or a hang of one stage does not hide the later ones.
Options that are unknown here go to pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.__main__ import results_path, run_benchmark, write_json
from benchmarks.isolation import ROOT
from benchmarks.machine import look, num_gpus
from benchmarks.registry import BENCHMARKS
from benchmarks.result import BenchmarkOutcome
from benchmarks.table import render
from tests.gpu.outcomes import LOG, Outcome, read_outcomes
from tests.gpu.stages import STAGES

FOLDER = ROOT / "tests" / "gpu"
BENCHMARK_STAGE = "benchmarks"
NO_TESTS = 5
"""pytest's exit code if it has selected no test."""


@dataclass
class Session:
    """Outcomes of one command. `paths`: files that receive them. `deadline`: time.monotonic() at its end."""

    deadline: float
    paths: Sequence[Path] = ()
    tests: dict[str, list[Outcome]] = field(default_factory=dict)
    benchmarks: list[BenchmarkOutcome] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def save(self) -> None:
        """Write all outcomes. Called after each stage, so that an interrupted command keeps the finished ones."""
        machine = look(gpu=True)
        tests = [{"stage": stage, **asdict(outcome)} for stage, found in self.tests.items() for outcome in found]
        for path in self.paths or ([results_path(machine)] if num_gpus() else []):
            write_json(path, machine, self.benchmarks, tests)

    def failed(self) -> bool:
        outcomes = [outcome.outcome for found in self.tests.values() for outcome in found]
        return "failed" in outcomes or any(each.reason and not each.skipped for each in self.benchmarks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if a test or a benchmark failed. What this machine cannot run is skipped."""
    options, for_pytest = _options(arguments)
    session = Session(time.monotonic() + 60 * options.minutes, [options.json] if options.json else [])
    stages = options.stages or [*STAGES, BENCHMARK_STAGE]
    for stage in stages:
        if stage == BENCHMARK_STAGE:
            session.benchmarks = [_benchmark(name, session) for name, each in BENCHMARKS.items() if each.gpu]
        else:
            session.tests[stage] = run_stage(stage, for_pytest, session.seconds_left)
        session.save()
    print("\n" + render(look(gpu=True).line, session.benchmarks))
    print("\n".join(summary(session.tests)))
    return int(session.failed())


def run_stage(stage: str, arguments: Sequence[str], seconds: float, folder: Path = FOLDER) -> list[Outcome]:
    """Run the tests of a stage in a process of their own, which is ended after `seconds`.

    A process that ends without the outcome of all its tests is a failure of its own.
    """
    if not seconds:
        return [Outcome(stage, "failed", reason="not run: the time limit (--minutes) is over")]
    files = [str(folder / name) for name in STAGES[stage] if (folder / name).exists()]
    if not files:
        return []
    print(f"\n== {stage}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mcore_rl_gpu_") as directory:
        log = Path(directory) / "outcomes.jsonl"
        command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.outcomes", *files, "-q", "-ra", "--no-fold-skipped"]
        process = subprocess.Popen(
            [*command, *arguments], cwd=ROOT, env={**os.environ, LOG: str(log)}, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            ending = f"pytest ended with code {code}"
        except subprocess.TimeoutExpired:
            code, ending = 1, f"still running after {seconds:.0f} s"
        finally:
            _end(process)
        outcomes = read_outcomes(log)
    if code not in (0, NO_TESTS) and "failed" not in {outcome.outcome for outcome in outcomes}:
        outcomes.append(Outcome(stage, "failed", reason=f"{ending}; its output is above"))
    return outcomes


def summary(tests: dict[str, list[Outcome]]) -> list[str]:
    """Return a line per stage, and the first failure."""
    lines, first = [], None
    for stage, outcomes in tests.items():
        counts = Counter(outcome.outcome for outcome in outcomes)
        counted = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped") if counts[kind])
        lines.append(f"{stage}: {counted or 'no tests'}, {sum(outcome.seconds for outcome in outcomes):.0f} s")
        first = first or next((each for each in outcomes if each.outcome == "failed"), None)
    if first is not None:
        lines.append(f"first failure: {first.test}: {first.reason.strip().splitlines()[-1] if first.reason else ''}")
    return lines


def _benchmark(name: str, session: Session) -> BenchmarkOutcome:
    if not session.seconds_left:
        return BenchmarkOutcome(name, reason="not run: the time limit (--minutes) is over")
    return run_benchmark(name)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, its group and, if it still runs, its descendants in other groups: runs of `mcore-rl train`."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def _options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*STAGES, BENCHMARK_STAGE]
    parser.add_argument("--stages", nargs="+", choices=names, metavar="NAME", help=f"default: {' '.join(names)}")
    parser.add_argument("--minutes", type=float, default=25, help="stages that start later fail (default: 25)")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the results to this file; default: benchmarks/results/<date>-<device>.json, on a GPU only",
    )
    return parser.parse_known_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
