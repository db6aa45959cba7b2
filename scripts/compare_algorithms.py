"""Run the demo's task with every algorithm that has a demo configuration, and write a table of results.

    make demo                                  # prepares the task and the warm-started model
    python scripts/compare_algorithms.py [--steps N] [--only grpo,ppo]

Results: benchmarks/results/DATE-cpu-algorithms.json. Complete runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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


def measure(name: str, steps: int | None) -> dict[str, Any]:
    """Run one algorithm and return its results."""
    overrides = [f"run.dir=runs/compare/{name}", *([f"trainer.steps={steps}"] if steps is not None else [])]
    config = load_config(str(ROOT / ALGORITHMS[name]), overrides)
    figures = ROOT / config.run.dir / "metrics.jsonl"
    records = read_metrics(figures)
    if not records or records[-1]["step"] < config.trainer.steps:
        train([ALGORITHMS[name], *overrides])
        records = read_metrics(figures)
    accuracy, reward, explained = (series(records, key) for key in FIGURES)
    return {
        "steps": records[-1]["step"],
        "accuracy": [accuracy[0], accuracy[-1]],
        # The reward of a single step is noisy, so average the first and the last five steps.
        "reward": [mean(reward[:5]), mean(reward[-5:])],
        "explained_variance": mean(explained[-5:]) if explained else None,
    }


FIGURES = ("val/accuracy", "reward/mean", "critic/explained_variance")


def series(records: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [float(record[key]) for record in records if record.get(key) is not None]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'algorithm':<22}" + "".join(f"{column:>18}" for column in COLUMNS)]
    for name, found in results.items():
        figures = [*found["accuracy"], *found["reward"], found["explained_variance"]]
        lines.append(f"{name:<22}" + "".join(f"{'-' if f is None else f'{f:.3f}':>18}" for f in figures))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="number of steps of every run; default: as configured")
    parser.add_argument("--only", help=f"comma-separated names: {', '.join(ALGORITHMS)}")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(ALGORITHMS)
    unknown = [name for name in names if name not in ALGORITHMS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(ALGORITHMS)}")
    if not (ROOT / DEMOS["work3"].exported).is_dir():
        parser.error("the demo's warm-started model does not exist; run `make demo` first")
    results = {name: measure(name, options.steps) for name in names}
    print(table(results))
    path = ROOT / "benchmarks" / "results" / f"{datetime.now(UTC):%Y-%m-%d}-cpu-algorithms.json"
    path.write_text(
        json.dumps({"machine": look(gpu=False).line, "algorithms": results}, indent=1) + "\n", encoding="utf-8"
    )
    print(path)


if __name__ == "__main__":
    main()
