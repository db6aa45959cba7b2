"""Cache of the experts of all tokens in a paged KV cache, with the same slots.

When an engine writes the keys and values of a token into a slot of its KV cache, the experts that the same pass chose
for the token are written into the same slot here. So the experts follow the KV cache in all cases: a prompt that is
computed in pieces fills its slots piece by piece; a preempted request is computed again in other slots; a cached prefix
is read by every request that shares its blocks. Example with blocks of 2 slots: requests A and B have the same first
two tokens, and B found their block in the cache:

    pass 1, rows of A    slots 6 7 2         experts written to 6 7 2
    pass 2, rows of A B  slots 3 | 4         experts written to 3 4
    A reads blocks 3 1 = slots 6 7 2 3       B reads blocks 3 2 = slots 6 7 4
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class RoutingCache:
    """Experts by slot. Shapes: int16 [slots, layers, k]; -1 is a slot that was never written."""

    def __init__(self, num_blocks: int, block_size: int, *, num_layers: int, topk: int, num_experts: int) -> None:
        self.block_size = block_size
        self.dtype = np.uint8 if num_experts <= 256 else np.int16
        # One extra slot: engines pad the rows of a pass with slot -1.
        shape = (num_blocks * block_size + 1, num_layers, topk)
        self._experts = torch.full(shape, -1, dtype=torch.int16)

    def write(self, layer: int, slots: torch.Tensor, experts: torch.Tensor) -> None:
        """Store the experts that a pass chose. `layer` counts layers with experts.

        Shapes: slots integer [rows], experts [rows, k].
        """
        if len(slots) != len(experts):
            raise ValueError(f"{len(experts)} rows were routed, but the pass has slots for {len(slots)}")
        self._experts[slots, layer] = experts.to(torch.int16)

    def read(self, blocks: Sequence[int], num_tokens: int) -> np.ndarray:
        """Return the experts of the first `num_tokens` tokens of the sequence in `blocks`.

        Shapes: [num_tokens, layers, k].
        Raises: RuntimeError for a token that no pass has routed.
        """
        first = torch.tensor(blocks, dtype=torch.int64)[:, None] * self.block_size
        slots = (first + torch.arange(self.block_size)).flatten()[:num_tokens]
        # The cache is int16, with -1 for unwritten slots. The result is uint8 if the expert numbers fit.
        experts = self._experts[slots].numpy()
        if len(experts) != num_tokens or (experts < 0).any():
            routed = int((experts >= 0).all(axis=(1, 2)).sum())
            raise RuntimeError(f"the engine has routed {routed} of a sequence's {num_tokens} tokens")
        return experts.astype(self.dtype)
