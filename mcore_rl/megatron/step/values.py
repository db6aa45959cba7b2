"""Gathering of a critic's values of whole responses from context-parallel ranks."""

from __future__ import annotations

import numpy as np
import torch

from mcore_rl.megatron.model.context import ContextPart
from mcore_rl.megatron.step.microbatches import MicroBatch


def whole_values(batch: MicroBatch, output: torch.Tensor, context: ContextPart) -> dict[int, np.ndarray]:
    """Collect, by sample, the values at the predictors of the trained tokens from all context-parallel ranks.

    Shapes: output [T], values of this rank's tokens -> float32 [n] per sample, for the whole response.
    Collective: the context-parallel group.
    """
    values = output.index_select(0, batch.predictors)
    if context.size > 1 and len(batch.owners):
        values = context.gather(values[None], batch.owners)[0]
    ends = np.cumsum(batch.whole_counts, dtype=np.int64)
    parts = np.split(values.cpu().numpy(), ends)[:-1]  # np.split adds an empty part after the last sample
    return dict(zip(batch.samples, parts, strict=True))
