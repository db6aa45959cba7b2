"""Check of the weights that a weight sync takes for frozen."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.lora.adapters import adapters
from mcore_rl.megatron.model.names import trained_names

_MAX_NAMED = 8


def require_frozen(chunks: Sequence[torch.nn.Module], frozen: Collection[str]) -> None:
    """Check that this rank trains none of the weights named in `frozen`, by weights or by adapters. Not collective.

    Raises: McoreRLError naming weights.
    """
    if not frozen:
        return
    trained = trained_names(chunks) | {name for name, _ in adapters(chunks)}
    if stale := sorted(trained.intersection(frozen)):
        listed = ", ".join(stale[:_MAX_NAMED])
        raise McoreRLError(f"weights are trained, but engines would receive them only once: {listed}")
