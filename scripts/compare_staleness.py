"""Run a demo synchronously and asynchronously with several seeds, and write a table of results.

    make demo                                  # prepares work3 and its warm-started model
    python scripts/demo.py --task think2       # the same for think2
    python scripts/compare_staleness.py [--task work3|think2] [--seeds N] [--steps N] [--only sync,eta2]

Results: benchmarks/results/DATE-cpu-staleness-TASK.json. Complete runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks, which is not installed

from compare_algorithms import series
from demo import DEMOS, ROOT, train

from benchmarks.machine import look
from mcore_rl.config import load_config
from mcore_rl.observe.metrics import read_metrics

TASKS = ("work3", "think2")
SAMPLES_PER_STEP = 256
"""Samples per step of the demos."""
DISAGGREGATED = ("cluster.placement=disaggregated", "cluster.gpus_per_node=3", "actor.num_ranks=2")
DECOUPLED = ("algorithm.policy_loss.name=decoupled_ppo",)


def ahead(eta: int, *more: str) -> tuple[str, ...]:
    """Return the settings of an asynchronous run with bound `eta`. The engine has a slot for every request that may be
    in flight. The engine is the slower side in the demos, so with fewer slots the groups would be younger than eta."""
    bounds = (f"rollout.max_staleness={eta}", f"rollout.max_staleness_hard={eta + 2}")
    return (*DISAGGREGATED, *bounds, f"rollout.max_concurrent_requests={(eta + 1) * SAMPLES_PER_STEP}", *more)


WAYS: dict[str, tuple[str, ...]] = {
    "sync": (),
    "eta1": ahead(1, *DECOUPLED),
    "eta2": ahead(2, *DECOUPLED),
    "eta4": ahead(4, *DECOUPLED),
    "eta4_uncorrected": ahead(4),
}
"""Overrides of the demo's configuration, by name."""
COLUMNS = ("before", "after: mean", "deviation", "best: mean", "staleness", "oldest")


def measure(task: str, name: str, seed: int, steps: int | None) -> dict[str, Any]:
    """Run one configuration with one seed and return its results."""
    path = DEMOS[task].config
    overrides = [f"run.dir=runs/staleness/{task}_{name}_{seed}", f"run.seed={seed}", *WAYS[name]]
    overrides += [f"trainer.steps={steps}"] if steps is not None else []
    config = load_config(str(ROOT / path), overrides)
    figures = ROOT / config.run.dir / "metrics.jsonl"
    records = read_metrics(figures)
    if not records or records[-1]["step"] < config.trainer.steps:
        train([path, *overrides])
        records = read_metrics(figures)
    accuracy = series(records, "val/accuracy")
    return {
        "steps": records[-1]["step"],
        "accuracy": accuracy,
        "staleness_mean": statistics.mean(series(records, "staleness/mean") or [0.0]),
        "staleness_max": max(series(records, "staleness/max") or [0.0]),
    }


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Format the accuracies of each configuration over its seeds."""
    lines = [f"{'':<18}" + "".join(f"{column:>13}" for column in COLUMNS)]
    for name, runs in results.items():
        after = [run["accuracy"][-1] for run in runs]
        figures = [
            statistics.mean(run["accuracy"][0] for run in runs),
            statistics.mean(after),
            statistics.stdev(after) if len(after) > 1 else 0.0,
            statistics.mean(max(run["accuracy"]) for run in runs),
            statistics.mean(run["staleness_mean"] for run in runs),
            max(run["staleness_max"] for run in runs),
        ]
        lines.append(f"{name:<18}" + "".join(f"{figure:>13.3f}" for figure in figures))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default=TASKS[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 1")
    parser.add_argument("--steps", type=int, help="number of steps of every run; default: as configured")
    parser.add_argument("--only", help=f"comma-separated names: {', '.join(WAYS)}")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(WAYS)
    unknown = [name for name in names if name not in WAYS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(WAYS)}")
    if not (ROOT / DEMOS[options.task].exported).is_dir():
        parser.error(f"the warm-started model does not exist; run `python scripts/demo.py --task {options.task}` first")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(1, options.seeds + 1):  # seed by seed, so that an interrupted comparison is fair
        for name in names:
            results[name].append(measure(options.task, name, seed, options.steps))
        print(table({name: runs for name, runs in results.items() if runs}), flush=True)
    path = ROOT / "benchmarks" / "results" / f"{datetime.now(UTC):%Y-%m-%d}-cpu-staleness-{options.task}.json"
    path.write_text(json.dumps({"machine": look(gpu=False).line, "ways": results}, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
