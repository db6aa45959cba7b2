"""Training of multi-token-prediction layers beside the policy.

The layer of depth d = 1..D combines the hidden state at position i with the embedding of token i + d and predicts token
i + d + 1. Its loss is the cross entropy of the trained tokens, whatever their advantages, at temperature 1:

    coefficient / (D * N)  *  sum over depths d and trained tokens t of  -log p_d(token t | hidden state at t - 1 - d)

N is the number of trained tokens of the update, over all ranks: a mean over tokens in which the caller's sum is exact
for every cut into micro-batches and every layout. A token with fewer than d + 1 tokens before it adds nothing at depth
d. Worked example, depth 1, two sequences (see microbatches.py), the last s a target only:

    sequences      p p p r s   p r s
    position       0 1 2 3     4 5
    embedded         p p r     . r           the next token of the sequence, none at its end
    predicts         r s       s             positions 1, 2 and 4; the second r has but one token before it

The loss trains these layers only. What they share with the policy (the trunk's hidden states, the embedding, the output
projection) is detached: it does not depend on rewards, and trained jointly it pulls the policy towards its own samples.
So the policy's gradient is that of a run without these layers.

Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 2.2; megatron.core.transformer.multi_token_prediction
(0.16.1). Detached in RL: Megatron-LM's mtp_isolated_loss (pull request 5080), SkyRL (1832), AReaL (1659).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mcore_rl.megatron import cpu

cpu.install()

from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.transformer.multi_token_prediction import (  # noqa: E402
    MultiTokenPredictionLayer,
    roll_tensor,
)


class DetachedMTPLayer(MultiTokenPredictionLayer):
    """megatron's layer on a detached embedding, and with full recomputation of packed rows."""

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        embedding: Callable[..., torch.Tensor],
        hidden_states: torch.Tensor,
        packed_seq_params: Any = None,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor]:
        del position_ids  # rotary positions are those of the row
        following, _ = roll_tensor(input_ids, cp_group=self.cp_group, packed_seq_params=packed_seq_params)
        with torch.no_grad():
            embedded = embedding(input_ids=following, position_ids=None)
        return following, None, embedded, hidden_states

    def _checkpointed_forward(self, forward_func: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if self.config.fp8:
            return super()._checkpointed_forward(forward_func, *args, **kwargs)
        # 0.16.1 saves all arguments for the backward pass, where PackedSeqParams, which are no tensor, are refused.
        assert not args
        inputs = [kwargs.pop(name) for name in ("hidden_states", "decoder_input")]

        def forward(hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
            return forward_func(hidden, embedded, **kwargs)

        return tensor_parallel.checkpoint(forward, self.config.distribute_saved_activations, *inputs)
