"""Values of whole responses, from the parts of context-parallel ranks."""

from __future__ import annotations

import numpy as np
import torch

from mcore_rl.megatron.model.context import ContextPart
from mcore_rl.megatron.step.microbatches import MicroBatch


def whole_values(batch: MicroBatch, output: torch.Tensor, context: ContextPart) -> dict[int, np.ndarray]:
    """The values that predict the trained tokens, by sample, joined over the context-parallel ranks.

    Shapes: output [T] of this rank's tokens; result float32 [n] of the whole response.
    Collective: the context-parallel group.
    """
    values = output.index_select(0, batch.predictors)
    if context.size > 1 and len(batch.owners):
        values = context.gather(values[None], batch.owners)[0]
    ends = np.cumsum(batch.whole_counts, dtype=np.int64)
    parts = np.split(values.cpu().numpy(), ends)[:-1]  # the last is what follows the last sample: nothing
    return dict(zip(batch.samples, parts, strict=True))
