"""mcore-rl in the whole_step benchmark: a run as in `mcore-rl train`, with forced response lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.whole_step.forced_lengths import force_lengths
from benchmarks.whole_step.task import (
    CLIP_HIGH,
    CLIP_LOW,
    LEARNING_RATE,
    LONGEST,
    PROMPTS,
    RESPONSES,
    SAMPLES,
    schedule,
)
from mcore_rl.assembly import assemble
from mcore_rl.config.schema import Config
from mcore_rl.observe.metrics import read_metrics
from mcore_rl.preparation.preflight import check_run
from mcore_rl.preparation.prepare import prepare
from mcore_rl.preparation.run_dir import make_log_folder, make_run_dir
from mcore_rl.trainer.loop import train
from mcore_rl.trainer.run import MetricsJournal


def step_config(task: Path, run_dir: Path, *, ranks: int, steps: int) -> Config:
    """Return the demo's configuration with one update per batch on `ranks` data-parallel trainer ranks, and as many
    engines, which generate on the cores of the waiting ranks. Expert parallelism would be slower: replicating such
    small experts costs less than sending tokens."""
    config = Config()
    config.run.dir = str(run_dir)
    config.model.hf_path = str(task / "model")
    config.model.tokenizer_path = str(task / "endless_tokenizer")
    config.data.train = [str(task / "train.jsonl")]
    config.data.template = "plain"
    config.rollout.samples_per_prompt = SAMPLES
    config.rollout.max_prompt_tokens = 16
    config.rollout.max_response_tokens = LONGEST
    config.rollout.num_engines = ranks
    config.rollout.max_concurrent_requests = RESPONSES // ranks
    config.reward.function = "benchmarks.whole_step.task:reward"
    config.algorithm.policy_loss.clip_low = CLIP_LOW
    config.algorithm.policy_loss.clip_high = CLIP_HIGH
    config.actor.tokens_per_microbatch = 8192  # as few micro-batches as TRL
    config.actor.optimizer.lr = LEARNING_RATE
    config.actor.optimizer.weight_decay = 0.0
    config.weights.bucket_mib = 8.0
    config.trainer.steps = steps
    config.trainer.prompts_per_step = config.trainer.prompts_per_update = PROMPTS
    config.trainer.validate_every_steps = 0
    config.cluster.gpus_per_node = ranks
    config.cluster.device = "cpu"
    return config


class StepTimer:
    """MetricsJournal that measures the duration of each step, and calls `between` after each step."""

    def __init__(self, journal: MetricsJournal, between: Callable[[], None]) -> None:
        self._journal = journal
        self._between = between
        self._started = 0.0
        self.seconds: list[float] = []
        self.record, self.resume_after, self.close = journal.record, journal.resume_after, journal.close

    def finish_step(self, step: int) -> None:
        self._journal.finish_step(step)
        if step > 0:  # step 0 is the validation before training
            self.seconds.append(time.perf_counter() - self._started)
            self._between()
        self._started = time.perf_counter()


def measure(task: Path, run_dir: Path, *, ranks: int, between: Callable[[], None]) -> list[dict[str, float]]:
    """Measure the seconds of every step of the schedule by phase. `between` runs after each step and is not
    measured."""
    lengths = schedule()
    config = step_config(task, run_dir, ranks=ranks, steps=len(lengths))
    check_run(config)
    prepared = prepare(config)
    make_run_dir(config, prepared.checkpoint_bytes, lambda: None)  # a new directory, no other run
    with assemble(config, prepared, make_log_folder(run_dir), lambda line: None) as run:
        fleet = run.collector.collector.pool.pool.fleet  # type: ignore[union-attr]
        handles = [engine.process.actor for engine in fleet.engines]
        force = [handle.__ray_call__.options(concurrency_group="run") for handle in handles]
        # Ray runs a function in the engine's process; its group `run` is where tasks are accepted.
        fleet.watch.get([call.remote(force_lengths, np.concatenate(lengths), SAMPLES) for call in force])
        timer = StepTimer(run.journal, between)
        run.journal = timer
        train(run)  # type: ignore[arg-type]
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] > 0]
    # A response that ended early would make this side look faster.
    _check_lengths(rows, lengths)
    phases = ("generate", "reward", "rollout", "logp", "update", "weight_sync")
    return [
        {"step": seconds, **{phase: row[f"time/{phase}"] for phase in phases}}
        for seconds, row in zip(timer.seconds, rows, strict=True)
    ]


def _check_lengths(rows: Sequence[Mapping[str, float]], lengths: Sequence[np.ndarray]) -> None:
    """Check that each step generated as many tokens as the other side."""
    for row, wanted in zip(rows, lengths, strict=True):
        assert round(row["tokens/generated"]) == int(wanted.sum()), f"step {row['step']}: {row['tokens/generated']}"
