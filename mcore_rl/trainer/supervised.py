"""Training on texts of the data set with the same actor: targets (warm start), and pairs of responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from mcore_rl.ports import Actor
from mcore_rl.trainer.run import SupervisedRun, end_profile, resume, save, saves_settled, steps_left
from mcore_rl.types import Batch, Mean, Metric

AnyBatch = TypeVar("AnyBatch")


@dataclass(frozen=True, kw_only=True)
class TextData(Generic[AnyBatch]):
    """Data of a TextObjective.

    next_batch: batch of the next rows, for a step. validation: batches of the validation rows, in order; None without
    any. parts: rows of the validation with metrics of their own, int64 [n] by name.
    """

    next_batch: Callable[[int], AnyBatch]
    validation: Callable[[], Iterator[AnyBatch]] | None = None
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def validates(self) -> bool:
        return self.validation is not None


@dataclass(frozen=True, kw_only=True)
class TargetObjective(TextData[Batch]):
    """Supervised training on target texts or conversations; implements TextObjective."""

    def train(self, actor: Actor, step: int) -> dict[str, Metric]:
        """Run the updates of the next batch."""
        return actor.update(actor.recompute_logp(self.next_batch(step)))

    def validate(self, actor: Actor) -> dict[str, Metric]:
        """Compute val/loss, the mean of -log p over the trained tokens, and val/loss/<part>."""
        assert self.validation is not None
        losses, tokens = [], []
        for batch in self.validation():
            losses.append(-actor.sequence_logp(batch).policy)
            tokens.append(batch.trained_tokens)
        loss, counts = np.concatenate(losses), np.concatenate(tokens)
        metrics: dict[str, Metric] = {"val/loss": Mean(float(loss.sum()), int(counts.sum()))}
        for name, rows in self.parts.items():
            metrics[f"val/loss/{name}"] = Mean(float(loss[rows].sum()), int(counts[rows].sum()))
        return metrics


def train_supervised(run: SupervisedRun) -> bool:
    """Run up to trainer.steps, starting from the newest checkpoint of the run directory if there is one. Returns False
    if the run was stopped earlier on request, after saving."""
    trainer, every = run.config.trainer, run.config.checkpoint.every_steps
    resumed = resume(run)
    if run.objective.validates and not resumed and trainer.validate_before:
        run.journal.record(run.objective.validate(run.actor))
        run.journal.finish_step(0)
    with run.checkpoints.copied(), saves_settled(run):
        for step in steps_left(run):
            update = run.objective.train(run.actor, step)
            run.state = run.state.finished(step, 0)
            end_profile(run)
            run.journal.record(update)
            last, accuracy = step == trainer.steps, None
            if run.objective.validates and (last or _due(step, trainer.validate_every_steps)):
                accuracy = _validate(run)
            run.journal.finish_step(step)
            run.checkpoints.poll()
            # A stop request in the last step is ignored: the run is finished anyway.
            stopping = run.stops.requested()
            if last or stopping or _due(step, every):
                save(run, accuracy)
            if stopping and not last:
                return False
    return True


def _validate(run: SupervisedRun) -> float | None:
    """Record the metrics of a validation and return its accuracy; None for an objective without one."""
    metrics = run.objective.validate(run.actor)
    run.journal.record(metrics)
    return metrics["val/accuracy"].value if "val/accuracy" in metrics else None


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
