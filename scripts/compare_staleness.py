"""Run a demo synchronously and asynchronously, or with several losses, with several seeds, and write a table of
results.

    make demo                                  # prepares work3 and its warm-started model
    python scripts/demo.py --task think2       # the same for think2
    python scripts/compare_staleness.py [--task work3|think2] [--seeds N] [--steps N] [--only sync,eta2]
    python scripts/compare_staleness.py --losses [--task think2] [--seeds 3] [--only gspo,gspo_corrected] [--continue]

With --losses, every policy loss runs asynchronously with eta 4, with and without a correction of the difference between
the policy that sampled and the trainer's. Losses with an anchor contain the correction: their ratio is taken to the
engine, or without correction to the trainer's policy before the update.

Results: benchmarks/results/DATE-cpu-staleness-TASK.json or DATE-cpu-losses-TASK.json, from which
scripts/benchmarks_page.py writes the tables of docs/benchmarks.md. They are written after every run. Complete runs are
not repeated. With --continue, results of the newest file are kept, so that a table can grow over several days.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compare_algorithms import chosen, finished_run, save, series
from demo import DEMOS, ROOT

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
LOSSES = ("ppo_clip", "gspo", "cispo", "sapo", "fipo", "real")
"""Losses that are compared with and without algorithm.corrections."""
ANCHORED = ("dppo_tv", "dppo_kl", "vespo", "dro")
"""Losses whose ratio has a choice of the denominator."""
OWN_AGGREGATION = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "real": "seq-mean-token-mean"}
"""Aggregations of the papers that differ from the demo's token-mean."""
CLIP_OPTIONS = ("clip_low", "clip_high", "dual_clip")
"""Options of ppo_clip that the demo sets."""
CORRECTED = "corrected"
ON_STALE_DATA = "losses_on_stale_data"
"""Key of the results with --losses."""


def losses_of_eta4() -> dict[str, tuple[str, ...]]:
    """Return the overrides of every loss, by name, without and with a correction."""
    found: dict[str, tuple[str, ...]] = {}
    for loss in (*LOSSES, *ANCHORED):
        # Others do not have these options, or have them with other meanings.
        options = [] if loss == "ppo_clip" else [f"algorithm.policy_loss.{key}=null" for key in CLIP_OPTIONS]
        named = (f"algorithm.policy_loss.name={loss}", *options)
        named += (f"algorithm.loss_aggregation={OWN_AGGREGATION.get(loss, 'token-mean')}",)
        without = ["algorithm.policy_loss.anchor=old"] if loss in ANCHORED else []
        corrected = (
            "algorithm.policy_loss.anchor=rollout" if without else "algorithm.correction_preset=decoupled_token_is"
        )
        found |= {loss: ahead(4, *named, *without), f"{loss}_{CORRECTED}": ahead(4, *named, corrected)}
    return found


COLUMNS = ("before", "after: mean", "deviation", "best: mean", "staleness", "oldest")


@dataclass(frozen=True)
class StalenessResult:
    """Accuracies of all validations, staleness in versions, and seconds of all steps without their validations."""

    steps: int
    accuracy: list[float]
    staleness_mean: float
    staleness_max: float
    seconds: float | None = None
    """None in early recorded results."""


def measure(task: str, name: str, seed: int, steps: int | None, way: Sequence[str]) -> StalenessResult:
    """Run one configuration, the overrides `way`, with one seed and return its results."""
    overrides = [f"run.dir=runs/staleness/{task}_{name}_{seed}", f"run.seed={seed}", *way]
    records = finished_run(DEMOS[task].config, overrides, steps)
    # Synchronous runs do not report staleness.
    staleness = series(records, "staleness/mean") or [0.0]
    oldest = series(records, "staleness/max") or [0.0]
    steps_done = int(records[-1]["step"])
    seconds = sum(series(records, "time/step"))
    return StalenessResult(
        steps_done, series(records, "val/accuracy"), statistics.mean(staleness), max(oldest), seconds
    )


def table(results: Mapping[str, Sequence[StalenessResult]]) -> str:
    """Format the accuracies of each configuration over its seeds."""
    lines = [f"{'':<20}" + "".join(f"{column:>13}" for column in COLUMNS)]
    for name, runs in results.items():
        # The last validation of each seed.
        after = [run.accuracy[-1] for run in runs]
        figures = [
            statistics.mean(run.accuracy[0] for run in runs),
            statistics.mean(after),
            statistics.stdev(after) if len(after) > 1 else 0.0,
            # An early peak that is lost again shows here.
            statistics.mean(max(run.accuracy) for run in runs),
            statistics.mean(run.staleness_mean for run in runs),
            max(run.staleness_max for run in runs),
        ]
        lines.append(f"{name:<20}" + "".join(f"{figure:>13.3f}" for figure in figures))
    return "\n".join(lines)


def newest(directory: Path, file: str, key: str) -> dict[str, list[StalenessResult]]:
    """Read the newest recorded results of a comparison, by configuration and seed; empty if there are none."""
    files = sorted(directory.glob(f"*-cpu-{file}.json"))
    found = json.loads(files[-1].read_text(encoding="utf-8"))[key] if files else {}
    return {name: [StalenessResult(**run) for run in runs] for name, runs in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default=TASKS[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 1")
    parser.add_argument("--steps", type=int, help="number of steps of every run; default: as configured")
    parser.add_argument("--losses", action="store_true", help="compare policy losses instead of bounds")
    parser.add_argument("--only", help=f"comma-separated names: {', '.join(WAYS)}; losses and LOSS_{CORRECTED}")
    parser.add_argument("--continue", dest="again", action="store_true", help="keep the results of the newest file")
    options = parser.parse_args(arguments)
    ways = losses_of_eta4() if options.losses else WAYS
    names = chosen(parser, options.only, ways, options.task)
    compared, key = ("losses", ON_STALE_DATA) if options.losses else ("staleness", "ways")
    file = f"{compared}-{options.task}"
    results = newest(ROOT / "benchmarks" / "results", file, key) if options.again else {}
    for seed in range(1, options.seeds + 1):  # seed by seed, so that an interrupted comparison is fair
        for name in names:
            runs = results.setdefault(name, [])
            if len(runs) < seed:
                runs.append(measure(options.task, name, seed, options.steps, ways[name]))
                save(file, key, results)
        print(table(results), flush=True)


if __name__ == "__main__":
    main()
