"""Runs that generate while they train beside runs that take turns: the same processes, lengths and updates.

One engine and one trainer rank, each with a core of its own, as `mcore-rl train` starts them; 8 groups of 4 lognormal
responses a step. Synchronous: a step waits for its longest response, then trains, then publishes. Asynchronous: 64
requests run all the time, weights swap under them. Epochs over a step's responses make training as long as generating a
batch synchronously, or half of it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.drawn_lengths import LONGEST
from benchmarks.isolation import ROOT
from benchmarks.result import Result
from benchmarks.whole_step import write_task
from mcore_rl.observe.metrics import read_metrics

GROUPS, SAMPLES, SLOTS = 8, 4, 64
STEPS, WARM_UP = 30, 8


@dataclass(frozen=True)
class Workload:
    """`epochs` over the responses of a step; `aim` bounds the synchronous run's seconds over those of the other."""

    name: str
    epochs: int
    max_staleness: int
    aim: str


WORKLOADS = (
    Workload("training as long as generating", 4, 1, ">= 1.9"),
    Workload("training half as long", 2, 2, ">= 2.7"),
)


@dataclass(frozen=True)
class Measured:
    """Of a step, seconds on average; staleness in versions."""

    step: float
    generating: float
    training: float
    publishing: float
    trainer_idle: float
    engine_idle: float
    mean_staleness: float
    max_staleness: float


def run() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="mcore_rl_async_step_") as directory:
        task = write_task(Path(directory) / "task")
        return [_compare(workload, task, Path(directory) / f"runs_{workload.epochs}") for workload in WORKLOADS]


def _compare(workload: Workload, task: Path, runs: Path) -> Result:
    """The synchronous run before and after the other one: a machine that gets slower shows."""
    epochs = f"trainer.update_epochs={workload.epochs}"
    before = _measure(task, runs / "before", [epochs])
    ours = _measure(task, runs / "ahead", [epochs, f"rollout.max_staleness={workload.max_staleness}"])
    after = _measure(task, runs / "after", [epochs])
    sync_step = (before.step + after.step) / 2
    generating, training = (before.generating + after.generating) / 2, (before.training + after.training) / 2
    busy = ours.step * (1 - ours.engine_idle)
    bound = sync_step / (max(busy, training) + ours.publishing)
    note = (
        f"synchronous: generating {generating:.2f} s, training {training:.2f} s a step; the engine is at work for "
        f"{busy:.2f} s of a step, so that {bound:.2f} is the bound\n"
        f"the trainer waits {ours.trainer_idle:.0%} of the time, the engine {ours.engine_idle:.0%}; staleness "
        f"{ours.mean_staleness:.2f} on average, {ours.max_staleness:.0f} at most; synchronous before and after: "
        f"{before.step:.2f}, {after.step:.2f} s"
    )
    name = f"{workload.name}, max_staleness {workload.max_staleness}"
    return Result(name, ours.step, sync_step, "s", sync_step / ours.step, workload.aim, note)


def _measure(task: Path, run_dir: Path, overrides: Sequence[str]) -> Measured:
    command = [str(Path(sys.executable).with_name("mcore-rl")), "train", "configs/demo_cpu.yaml"]
    subprocess.run(
        [*command, *_settings(task, run_dir), *overrides], check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=600
    )
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] > WARM_UP]
    training = _mean(rows, "time/update") + _mean(rows, "time/logp")
    step = _mean(rows, "time/step")
    return Measured(
        step,
        _mean(rows, "time/generate"),
        training,
        _mean(rows, "time/weight_sync"),
        _mean(rows, "time/trainer_idle") / step,
        _mean(rows, "time/generator_idle") / step,
        _mean(rows, "staleness/mean"),
        max(row.get("staleness/max", 0) for row in rows),
    )


def _settings(task: Path, run_dir: Path) -> list[str]:
    settings: dict[str, Any] = {
        "run.dir": run_dir,
        "model.hf_path": task / "model",
        "model.tokenizer_path": task / "endless_tokenizer",
        "model.check_logits": "never",
        "data.train": task / "train.jsonl",
        "data.val": "null",
        "rollout.episode": ROOT / "benchmarks" / "drawn_lengths.py:run",
        "rollout.max_response_tokens": LONGEST,
        "rollout.samples_per_prompt": SAMPLES,
        "rollout.max_concurrent_requests": SLOTS,
        "rollout.max_concurrent_episodes": SLOTS,
        "reward.function": ROOT / "benchmarks" / "whole_step_task.py:reward",
        "reward.overlong.enable": "false",
        "algorithm.dynamic_sampling.enable": "false",
        "algorithm.policy_loss.name": "decoupled_ppo",
        "actor.num_ranks": 1,
        "actor.parallel.ep": 1,
        "actor.optimizer.lr": 1e-6,
        "weights.verify_every": 0,
        "trainer.steps": STEPS,
        "trainer.prompts_per_step": GROUPS,
        "trainer.prompts_per_update": GROUPS,
        "trainer.validate_before": "false",
        "trainer.validate_every_steps": 0,
        "checkpoint.every_steps": 0,
        "cluster.gpus_per_node": 2,
        "cluster.placement": "disaggregated",
    }
    return [f"{key}={value}" for key, value in settings.items()]


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows) / len(rows)
