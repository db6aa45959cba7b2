"""Construction of the objectives that train on texts of the data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from mcore_rl.config.schema import Config
from mcore_rl.data.batching import UpdateSchedule, build_batch, gather
from mcore_rl.data.prompts import SupervisedSet, supervised_chunk
from mcore_rl.data.supervised.targets import PairSet, pair_chunk
from mcore_rl.preparation.prepare import Prepared
from mcore_rl.trainer.batches import response_weights
from mcore_rl.trainer.preference import PairObjective
from mcore_rl.trainer.run import TextObjective
from mcore_rl.trainer.supervised import TargetObjective
from mcore_rl.types import Batch, BuffersRef, RolloutScalars, TrajectoryBuffers

Store = Callable[[TrajectoryBuffers], BuffersRef]
"""Function that wraps trajectories which the driver holds for Batch.chunks."""


def text_objective(config: Config, prepared: Prepared, store: Store) -> TextObjective:
    """Build the configured objective of a run without engines."""
    if prepared.data.pairs:
        return _pair_objective(config, prepared, store)
    assert prepared.data.targets is not None
    return _target_objective(config, prepared, prepared.data.targets, store)


def _target_objective(config: Config, prepared: Prepared, targets: SupervisedSet, store: Store) -> TargetObjective:
    sampler, trainer = prepared.sampler, config.trainer
    schedule = UpdateSchedule(trainer.prompts_per_update, num_dp_ranks=prepared.layout.dp, cost=prepared.cost)
    weights_of = response_weights(config.algorithm, config.rollout.max_response_tokens)

    def next_batch() -> Batch:
        """Build a batch of the next prompts_per_step rows, each a group of its own."""
        chunk = supervised_chunk(targets, sampler.draw(trainer.prompts_per_step))
        return _batch(chunk, store, schedule, weights_of)

    return TargetObjective(next_batch)


def _pair_objective(config: Config, prepared: Prepared, store: Store) -> PairObjective:
    train, val = prepared.data.pairs["train"], prepared.data.pairs.get("val")
    size, sampler = config.trainer.prompts_per_step, prepared.sampler

    def batch_of(pairs: PairSet, rows: np.ndarray) -> Batch:
        schedule = UpdateSchedule(len(rows), num_dp_ranks=prepared.layout.dp, cost=prepared.cost)
        return _batch(pair_chunk(pairs, rows), store, schedule, mean_over_pairs)

    def validation() -> Iterator[Batch]:
        assert val is not None
        for first in range(0, len(val), size):
            yield batch_of(val, np.arange(first, min(first + size, len(val))))

    return PairObjective(
        config.preference,
        lambda: batch_of(train, sampler.draw(size)),
        None if val is None else validation,
        prepared.data.validation_parts.rows,
    )


def mean_over_pairs(trained_tokens: np.ndarray) -> np.ndarray:
    """Return the loss weights for the mean over pairs: the reciprocal of their number.

    Shapes: int32 [b], two responses per pair -> float32 [b].
    """
    return np.full(len(trained_tokens), 2 / len(trained_tokens), np.float32)


def _batch(
    chunk: tuple[TrajectoryBuffers, RolloutScalars],
    store: Store,
    schedule: UpdateSchedule,
    weights_of: Callable[[np.ndarray], np.ndarray],
) -> Batch:
    """Build a batch without advantages from one chunk of trajectories."""
    buffers, scalars = chunk
    return build_batch([store(buffers)], gather([scalars]), schedule=schedule, weights_of=weights_of)
