"""`mcore-rl train` on two cores: one engine and one trainer rank, responses of sampled lengths."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from benchmarks.children import run_command
from benchmarks.isolation import ROOT
from mcore_rl.observe.metrics import TIMELINE, read_metrics
from mcore_rl.observe.timeline import read_timeline

SWAP_ENDS = "finish weight update"


@dataclass(frozen=True)
class Shape:
    """Shape of a run: groups per step, samples per group, concurrent requests, lengths (sampled_lengths.py).

    warm_up: number of first steps that are not measured.
    """

    groups: int
    samples: int
    slots: int
    median: int
    longest: int
    steps: int
    warm_up: int


@dataclass(frozen=True)
class StepMeans:
    """Mean seconds per step and staleness in versions.

    stop: seconds per weight swap in which the engine does not sample.
    """

    step: float
    generating: float
    training: float
    publishing: float
    stop: float
    trainer_idle: float
    engine_idle: float
    mean_staleness: float
    max_staleness: float


def measure(shape: Shape, task: Path, run_dir: Path, overrides: Sequence[str]) -> StepMeans:
    command = [str(Path(sys.executable).with_name("mcore-rl")), "train", "configs/demo_cpu.yaml"]
    run_command([*command, *_settings(shape, task, run_dir), *overrides], ROOT, timeout=600)
    # The first steps warm up.
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] > shape.warm_up]
    training = _mean(rows, "time/update") + _mean(rows, "time/logp")
    step = _mean(rows, "time/step")
    return StepMeans(
        step,
        _mean(rows, "time/generate"),
        training,
        _mean(rows, "time/weight_sync"),
        _stop(run_dir / TIMELINE),
        _mean(rows, "time/trainer_idle") / step,
        _mean(rows, "time/generator_idle") / step,
        _mean(rows, "staleness/mean"),
        max(row.get("staleness/max", 0) for row in rows),
    )


def _settings(shape: Shape, task: Path, run_dir: Path) -> list[str]:
    settings: dict[str, object] = {
        "run.dir": run_dir,
        "model.hf_path": task / "model",
        "model.tokenizer_path": task / "endless_tokenizer",  # only the sampled length ends a response
        "model.check_logits": "never",
        "data.train": task / "train.jsonl",
        "data.val": "null",
        "rollout.episode": ROOT / "benchmarks" / "asynchronous" / "sampled_lengths.py:run",
        "rollout.episode_kwargs": f"{{median: '{shape.median}', longest: '{shape.longest}'}}",
        "rollout.max_response_tokens": shape.longest,
        "rollout.samples_per_prompt": shape.samples,
        "rollout.max_concurrent_requests": shape.slots,
        "rollout.max_concurrent_episodes": shape.slots,
        "reward.function": ROOT / "benchmarks" / "whole_step/task.py:reward",
        "reward.overlong.enable": "false",
        "algorithm.dynamic_sampling.enable": "false",
        "algorithm.policy_loss.name": "decoupled_ppo",
        "actor.num_ranks": 1,
        "actor.parallel.ep": 1,
        "actor.optimizer.lr": 1e-6,
        # Validation, checks and checkpoints would add to a step.
        "weights.verify_every": 0,
        "trainer.steps": shape.steps,
        "trainer.prompts_per_step": shape.groups,
        "trainer.prompts_per_update": shape.groups,
        "trainer.validate_before": "false",
        "trainer.validate_every_steps": 0,
        "checkpoint.every_steps": 0,
        "cluster.gpus_per_node": 2,
        "cluster.placement": "disaggregated",
    }
    return [f"{key}={value}" for key, value in settings.items()]


def _stop(timeline: Path) -> float:
    """Return the mean duration of a weight update in the engine, without the first one."""
    swaps: list[float] = []
    receiving = 0.0
    events = [event for event in read_timeline(timeline) if event["name"] in ("receive bucket", SWAP_ENDS)]
    for event in sorted(events, key=itemgetter("ts")):
        receiving += event["dur"] * 1e-6
        if event["name"] == SWAP_ENDS:
            swaps.append(receiving)
            receiving = 0.0
    return sum(swaps[1:]) / len(swaps[1:])


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows) / len(rows)
