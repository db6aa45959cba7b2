"""Construction of the objectives that train on texts of the data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from mcore_rl.config.objectives import PAIRED
from mcore_rl.config.rules.objective import trains_scores
from mcore_rl.config.rules.validation import read_hf_config
from mcore_rl.config.schema import Config
from mcore_rl.data.batching import LossWeights, UpdateSchedule, build_batch, gather
from mcore_rl.data.prompts import supervised_chunk
from mcore_rl.data.supervised.targets import TextSet, scored_chunk, text_chunk
from mcore_rl.preparation.prepare import Prepared
from mcore_rl.trainer.batches import response_weights
from mcore_rl.trainer.preference import PairBatch, PairObjective
from mcore_rl.trainer.run import TextObjective
from mcore_rl.trainer.supervised import TargetObjective
from mcore_rl.types import Batch, BuffersRef, RolloutScalars, TrajectoryBuffers
from model_converters.vision_model import flat_fields

Chunk = tuple[TrajectoryBuffers, RolloutScalars]
ChunkOf = Callable[[TextSet, np.ndarray], Chunk]
"""Function (texts, rows) that builds a chunk of trajectories."""
Store = Callable[[TrajectoryBuffers], BuffersRef]
"""Function that wraps trajectories which the driver holds for Batch.chunks."""


def text_objective(config: Config, prepared: Prepared, store: Store) -> TextObjective:
    """Build the configured objective of a run without engines."""
    data, trainer = prepared.data, config.trainer
    count, sampler = trainer.prompts_per_step, prepared.sampler
    batches = _Batches(config, prepared, store)
    if (targets := data.targets) is not None:
        return TargetObjective(
            next_batch=lambda step: batches.train(supervised_chunk(targets, sampler.draw(count)), step)
        )
    parts, train, val = data.validation_parts.rows, data.texts["train"], data.texts.get("val")
    if trainer.objective in PAIRED:
        of_scores = trains_scores(config)
        chunk_of = partial(scored_chunk, padding_id=_padding_id(config)) if of_scores else text_chunk
        return PairObjective(
            next_batch=lambda step: batches.pairs(train, chunk_of, sampler.draw(count), mean_over_pairs),
            validation=None
            if val is None
            else lambda: (batches.pairs(val, chunk_of, rows) for rows in batches.validation_rows(val)),
            parts=parts,
            section=config.preference,
            trains_scores=of_scores,
        )
    return TargetObjective(
        next_batch=lambda step: batches.train(text_chunk(train, sampler.draw(count)), step),
        validation=None
        if val is None
        else lambda: (batches.whole(text_chunk(val, rows)) for rows in batches.validation_rows(val)),
        parts=parts,
    )


def _padding_id(config: Config) -> int | None:
    """Return the padding token of the model, by which transformers' sequence classification finds the last token."""
    padding = flat_fields(read_hf_config(config.model)).get("pad_token_id")
    return padding if isinstance(padding, int) else None


@dataclass(frozen=True)
class _Batches:
    """Builder of batches from chunks of trajectories."""

    config: Config
    prepared: Prepared
    store: Store

    def train(self, chunk: Chunk, step: int) -> Batch:
        """Build a batch with the configured updates and aggregation of the loss."""
        weights_of = response_weights(self.config.algorithm, self.config.rollout.max_response_tokens)
        return self._batch(chunk, self.config.trainer.prompts_per_update, weights_of, step)

    def whole(self, chunk: Chunk, weights_of: LossWeights | None = None) -> Batch:
        """Build a batch with one update. weights_of: see build_batch."""
        return self._batch(chunk, len(np.unique(chunk[1].group_ids)), weights_of)

    def pairs(
        self, texts: TextSet, chunk_of: ChunkOf, rows: np.ndarray, weights_of: LossWeights | None = None
    ) -> PairBatch:
        """Build a batch of pairs with one update."""
        return PairBatch(self.whole(chunk_of(texts, rows), weights_of), texts.margins[rows])

    def validation_rows(self, texts: TextSet) -> Iterator[np.ndarray]:
        """Yield the rows of each batch, in order."""
        step = self.config.trainer.prompts_per_step
        for first in range(0, len(texts), step):
            yield np.arange(first, min(first + step, len(texts)))

    def _batch(self, chunk: Chunk, prompts_per_update: int, weights_of: LossWeights | None, step: int = 0) -> Batch:
        buffers, scalars = chunk
        # Without advantages: the objective computes the weights of pairs later.
        schedule = UpdateSchedule(
            prompts_per_update,
            self.config.trainer.update_epochs,
            num_dp_ranks=self.prepared.layout.dp,
            seed=(self.config.run.seed, step),
            cost=self.prepared.cost,
        )
        return build_batch([self.store(buffers)], gather([scalars]), schedule=schedule, weights_of=weights_of)


def mean_over_pairs(trained_tokens: np.ndarray, _group_ids: np.ndarray | None = None) -> np.ndarray:
    """Return the loss weights for the mean over pairs: the reciprocal of their number.

    Shapes: int32 [b], two responses per pair -> float32 [b].
    """
    return np.full(len(trained_tokens), 2 / len(trained_tokens), np.float32)
