"""Training of multi-token-prediction (MTP) layers in addition to the policy.

The layer of depth d = 1..D combines the hidden state at position i with the embedding of token i + d and predicts token
i + d + 1. Its loss is the cross entropy of the trained tokens at temperature 1, independent of their advantages:

    coefficient / (D * N)  *  sum over depths d and trained tokens t of  -log p_d(token t | hidden state at t - 1 - d)

N is the number of trained tokens of the update on all ranks, so the sum over micro-batches is exact for every layout. A
token with fewer than d + 1 tokens before it contributes nothing at depth d. Example for depth 1 and two sequences (see
microbatches.py); the last s of each is only a target:

    sequences      p p p r s   p r s
    position       0 1 2 3     4 5
    embedded       p p r .     r .           the next token of the sequence, none at its end
    predicts         r s       s             positions 1, 2 and 4; the second r has only one token before it

The loss trains only the MTP layers. The inputs that they share with the policy (hidden states of the trunk, embedding,
output projection) are detached: the MTP loss ignores rewards, and joint training would pull the policy towards its own
samples. The policy's gradient therefore equals that in a run without MTP layers.

Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 2.2; megatron.core.transformer.multi_token_prediction
(0.16.1). Detached in RL: Megatron-LM's mtp_isolated_loss (pull request 5080), SkyRL (1832), AReaL (1659).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer, roll_tensor


class DetachedMTPLayer(MultiTokenPredictionLayer):
    """Megatron's MTP layer with a detached embedding and support for full recomputation of packed rows."""

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        embedding: Callable[..., torch.Tensor],
        hidden_states: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor]:
        del position_ids  # rotary embeddings use the positions of the row
        following, _ = roll_tensor(input_ids, cp_group=self.cp_group, packed_seq_params=packed_seq_params)
        with torch.no_grad():
            embedded = embedding(input_ids=following, position_ids=None)
        return following, None, embedded, hidden_states

    def _checkpointed_forward(
        self, forward_func: Callable[..., torch.Tensor], *args: object, **kwargs: object
    ) -> torch.Tensor:
        if self.config.fp8:
            return super()._checkpointed_forward(forward_func, *args, **kwargs)
        # megatron-core 0.16.1 saves all arguments for the backward pass and fails for PackedSeqParams, not a tensor.
        assert not args
        inputs = [kwargs.pop(name) for name in ("hidden_states", "decoder_input")]

        def forward(hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
            return forward_func(hidden, embedded, **kwargs)

        return tensor_parallel.checkpoint(forward, self.config.distribute_saved_activations, *inputs)
