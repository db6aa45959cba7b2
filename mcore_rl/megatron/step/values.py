"""Gathering of values of whole responses from context-parallel ranks."""

from __future__ import annotations

import numpy as np
import torch

from mcore_rl.megatron.model.context import ContextPart
from mcore_rl.megatron.step.microbatches import MicroBatch


def whole_by_sample(batch: MicroBatch, values: torch.Tensor, context: ContextPart) -> dict[int, np.ndarray]:
    """Gather the values of all trained tokens of a micro-batch and split them by sample.

    Shapes: values [N] of this rank's trained tokens -> float32 [n] per sample, for the whole response.
    Collective: the context-parallel group.
    """
    if context.size > 1 and len(batch.owners):
        values = context.gather(values[None], batch.owners)[0]
    ends = np.cumsum(batch.whole_counts, dtype=np.int64)
    parts = np.split(values.float().cpu().numpy(), ends)[:-1]  # np.split adds an empty part after the last sample
    return dict(zip(batch.samples, parts, strict=True))
