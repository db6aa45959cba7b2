"""Construction of the objectives that train on texts of the data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from mcore_rl.config.schema import Config
from mcore_rl.data.batching import LossWeights, UpdateSchedule, build_batch, gather
from mcore_rl.data.prompts import supervised_chunk
from mcore_rl.data.supervised.targets import conversation_chunk, pair_chunk
from mcore_rl.preparation.prepare import Prepared
from mcore_rl.trainer.batches import response_weights
from mcore_rl.trainer.preference import PairObjective
from mcore_rl.trainer.run import TextObjective
from mcore_rl.trainer.supervised import TargetObjective
from mcore_rl.types import Batch, BuffersRef, RolloutScalars, TrajectoryBuffers

Chunk = tuple[TrajectoryBuffers, RolloutScalars]
Store = Callable[[TrajectoryBuffers], BuffersRef]
"""Function that wraps trajectories which the driver holds for Batch.chunks."""


def text_objective(config: Config, prepared: Prepared, store: Store) -> TextObjective:
    """Build the configured objective of a run without engines."""
    data, trainer = prepared.data, config.trainer
    step, sampler = trainer.prompts_per_step, prepared.sampler
    batches = _Batches(config, prepared, store)
    if (targets := data.targets) is not None:
        return TargetObjective(lambda: batches.train(supervised_chunk(targets, sampler.draw(step))))
    parts = data.validation_parts.rows
    if data.pairs:
        train, val = data.pairs["train"], data.pairs.get("val")
        return PairObjective(
            config.preference,
            lambda: batches.whole(pair_chunk(train, sampler.draw(step)), mean_over_pairs),
            None if val is None else lambda: batches.validation(len(val), partial(pair_chunk, val)),
            parts,
        )
    rows, held_out = data.conversations["train"], data.conversations.get("val")
    return TargetObjective(
        lambda: batches.train(conversation_chunk(rows, sampler.draw(step))),
        None if held_out is None else lambda: batches.validation(len(held_out), partial(conversation_chunk, held_out)),
        parts,
    )


@dataclass(frozen=True)
class _Batches:
    """Builder of batches from chunks of trajectories."""

    config: Config
    prepared: Prepared
    store: Store

    def train(self, chunk: Chunk) -> Batch:
        """Build a batch with the configured updates and aggregation of the loss."""
        weights_of = response_weights(self.config.algorithm, self.config.rollout.max_response_tokens)
        return self._batch(chunk, self.config.trainer.prompts_per_update, weights_of)

    def whole(self, chunk: Chunk, weights_of: LossWeights | None = None) -> Batch:
        """Build a batch with one update. weights_of: see build_batch."""
        return self._batch(chunk, len(np.unique(chunk[1].group_ids)), weights_of)

    def validation(self, size: int, chunk_of: Callable[[np.ndarray], Chunk]) -> Iterator[Batch]:
        """Yield batches of all `size` rows, in order."""
        step = self.config.trainer.prompts_per_step
        for first in range(0, size, step):
            yield self.whole(chunk_of(np.arange(first, min(first + step, size))))

    def _batch(self, chunk: Chunk, prompts_per_update: int, weights_of: LossWeights | None) -> Batch:
        buffers, scalars = chunk
        # Without advantages: the objective computes the weights of pairs later.
        schedule = UpdateSchedule(
            prompts_per_update,
            self.config.trainer.update_epochs,
            num_dp_ranks=self.prepared.layout.dp,
            cost=self.prepared.cost,
        )
        return build_batch([self.store(buffers)], gather([scalars]), schedule=schedule, weights_of=weights_of)


def mean_over_pairs(trained_tokens: np.ndarray, _group_ids: np.ndarray | None = None) -> np.ndarray:
    """Return the loss weights for the mean over pairs: the reciprocal of their number.

    Shapes: int32 [b], two responses per pair -> float32 [b].
    """
    return np.full(len(trained_tokens), 2 / len(trained_tokens), np.float32)
