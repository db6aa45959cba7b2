"""Run the demo's task with every algorithm that has a demo configuration, and write a table of results.

    make demo                                  # prepares the task and the warm-started model
    python scripts/compare_algorithms.py [--steps N] [--only grpo,ppo]

Results: benchmarks/results/DATE-cpu-algorithms.json. Complete runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks, which is not installed

from demo import DEMOS, ROOT, train

from benchmarks.machine import look
from mcore_rl.config import load_config
from mcore_rl.observe.metrics import read_metrics

ALGORITHMS = {
    "dapo": "configs/demo_cpu.yaml",
    "grpo": "configs/demo_grpo_cpu.yaml",
    "gspo": "configs/demo_gspo_cpu.yaml",
    "ppo": "configs/demo_ppo_cpu.yaml",
    "reinforce_plus_plus": "configs/demo_reinforce_plus_plus_cpu.yaml",
    "remax": "configs/demo_remax_cpu.yaml",
}
COLUMNS = ("accuracy before", "after", "reward before", "after", "explained variance")


@dataclass(frozen=True)
class AlgorithmResult:
    """Values at the start and the end of a run."""

    steps: int
    accuracy: tuple[float, float]
    reward: tuple[float, float]
    """Means of the first and the last five steps: the reward of a single step is noisy."""
    explained_variance: float | None


def measure(name: str, steps: int | None) -> AlgorithmResult:
    """Run one algorithm and return its results."""
    records = finished_run(ALGORITHMS[name], [f"run.dir=runs/compare/{name}"], steps)
    # Only runs with a critic report an explained variance.
    accuracy, reward, explained = (
        series(records, key) for key in ("val/accuracy", "reward/mean", "critic/explained_variance")
    )
    return AlgorithmResult(
        int(records[-1]["step"]),
        (accuracy[0], accuracy[-1]),
        (mean(reward[:5]), mean(reward[-5:])),
        mean(explained[-5:]) if explained else None,
    )


def finished_run(path: str, overrides: Sequence[str], steps: int | None) -> Sequence[Mapping[str, float]]:
    """Complete the run of a configuration, unless it is complete, and return its metrics."""
    overrides = [*overrides, *([f"trainer.steps={steps}"] if steps is not None else [])]
    config = load_config(str(ROOT / path), overrides)
    metrics = ROOT / config.run.dir / "metrics.jsonl"
    records = read_metrics(metrics)
    # A run that was interrupted is resumed, and a longer --steps continues a complete one.
    if not records or records[-1]["step"] < config.trainer.steps:
        train([path, *overrides])
        records = read_metrics(metrics)
    return records


def series(records: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [float(record[key]) for record in records if record.get(key) is not None]


def chosen(parser: argparse.ArgumentParser, only: str | None, known: Mapping[str, object], task: str) -> list[str]:
    """Return the names given with --only, or all. Ends the program if one is unknown or the task is not prepared."""
    names = only.split(",") if only else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    if not (ROOT / DEMOS[task].exported).is_dir():
        parser.error(f"the warm-started model does not exist; run `python scripts/demo.py --task {task}` first")
    return names


def save(name: str, key: str, results: Mapping[str, object]) -> None:
    """Write results to benchmarks/results and print the path."""
    path = ROOT / "benchmarks" / "results" / f"{datetime.now(UTC):%Y-%m-%d}-cpu-{name}.json"
    # Results are dataclasses, which JSON does not know.
    content = {"machine": look(gpu=False).line, key: results}
    path.write_text(json.dumps(content, indent=1, default=vars) + "\n", encoding="utf-8")
    print(path)


def table(results: Mapping[str, AlgorithmResult]) -> str:
    lines = [f"{'algorithm':<22}" + "".join(f"{column:>18}" for column in COLUMNS)]
    for name, found in results.items():
        figures = [*found.accuracy, *found.reward, found.explained_variance]
        lines.append(f"{name:<22}" + "".join(f"{'-' if f is None else f'{f:.3f}':>18}" for f in figures))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="number of steps of every run; default: as configured")
    parser.add_argument("--only", help=f"comma-separated names: {', '.join(ALGORITHMS)}")
    options = parser.parse_args()
    names = chosen(parser, options.only, ALGORITHMS, "work3")
    results = {name: measure(name, options.steps) for name in names}
    print(table(results))
    save("algorithms", "algorithms", results)


if __name__ == "__main__":
    main()
