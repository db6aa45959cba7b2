"""Asynchronous and synchronous runs with the same processes, lengths and updates.

`mcore-rl train` starts one engine and one trainer rank with a core each. A step has 6 groups of 4 responses with
lognormal lengths (mean 128 tokens). Synchronous: a step waits for its longest response, then trains, then publishes.
Asynchronous: up to 64 requests run all the time, also during weight changes. The number of epochs is chosen such that
training takes as long as the synchronous generation of a batch, or half as long. Colocated: two engines and two ranks
take turns on both cores.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.asynchronous.training import Shape, measure
from benchmarks.result import Result, compare
from benchmarks.sizes import size
from benchmarks.whole_step.step import write_task

SHAPE = Shape(
    **size(
        {"groups": 6, "samples": 4, "slots": 64, "median": 96, "longest": 512, "steps": 26, "warm_up": 6},
        {"groups": 2, "samples": 2, "slots": 4, "median": 4, "longest": 16, "steps": 3, "warm_up": 0},
    )
)


@dataclass(frozen=True)
class EpochWorkload:
    """Ratio of training to generation.

    epochs: epochs over the responses of a step.
    aim: minimum speed-up over the synchronous run.
    """

    name: str
    epochs: int
    max_staleness: int
    aim: str


WORKLOADS = (
    EpochWorkload("training as long as generating", 4, 2, ">= 1.9"),
    EpochWorkload("training half as long", 2, 4, ">= 2.7"),
)[: size(2, 1)]
STOP_MS = 20.0
"""Limit for the pause of generation during a weight sync, in milliseconds."""
COLOCATED = ("cluster.placement=colocated", "actor.num_ranks=2", "rollout.num_engines=2")


def run() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="mcore_rl_async_step_") as directory:
        task = write_task(Path(directory) / "task")
        results = []
        for workload in WORKLOADS:
            results += _compare(workload, task, Path(directory) / f"runs_{workload.epochs}")
        return results


def _compare(workload: EpochWorkload, task: Path, runs: Path) -> list[Result]:
    """Measure the synchronous run before and after the asynchronous one, to detect a machine that slows down."""
    epochs = f"trainer.update_epochs={workload.epochs}"
    before = measure(SHAPE, task, runs / "before", [epochs])
    ours = measure(SHAPE, task, runs / "ahead", [epochs, f"rollout.max_staleness={workload.max_staleness}"])
    after = measure(SHAPE, task, runs / "after", [epochs])
    # The usual alternative on the same cores: both sides use all of them, in turn.
    colocated = measure(SHAPE, task, runs / "colocated", [epochs, *COLOCATED])
    sync_step = (before.step + after.step) / 2
    generating, training = (before.generating + after.generating) / 2, (before.training + after.training) / 2
    # With perfect overlap, a step takes as long as the slower side, plus the weight update, which stops both.
    busy = ours.step * (1 - ours.engine_idle)
    bound = sync_step / (max(busy, training) + ours.publishing)
    note = (
        f"synchronous: generating {generating:.2f} s, training {training:.2f} s per step; the engine is busy for "
        f"{busy:.2f} s of a step, so the bound is {bound:.2f}\n"
        f"the trainer waits {ours.trainer_idle:.0%} of the time, the engine {ours.engine_idle:.0%}; staleness "
        f"{ours.mean_staleness:.2f} on average, {ours.max_staleness:.0f} at most; synchronous before and after: "
        f"{before.step:.2f}, {after.step:.2f} s"
    )
    name = f"{workload.name}, max_staleness {workload.max_staleness}"
    shared = (
        f"colocated: generating {colocated.generating:.2f} s, training {colocated.training:.2f} s per step, each on "
        "both cores"
    )
    beside = f"{name}, beside a colocated run"
    swap = f"{name}, the engine's stop per swap"
    megabytes = (task / "model" / "model.safetensors").stat().st_size / 1e6
    synchronous = f"{before.stop * 1e3:.1f} ms in the synchronous run"
    whole = f"includes waiting for the trainer and copying {megabytes:.0f} MB; {synchronous}"
    return [
        Result(name, ours.step, sync_step, "s", sync_step / ours.step, workload.aim, note),
        Result(beside, ours.step, colocated.step, "s", colocated.step / ours.step, "", shared),
        compare(swap, ours.stop * 1e3, STOP_MS, "ms", "<= 1.0", whole),
    ]
