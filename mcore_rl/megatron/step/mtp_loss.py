"""Loss of multi-token-prediction layers."""

from __future__ import annotations

import torch
from megatron.core.transformer.multi_token_prediction import roll_tensor

from mcore_rl.megatron.model.output import output_weight, unwrap
from mcore_rl.megatron.step.logprobs import linear_logp_entropy
from mcore_rl.megatron.step.microbatches import MicroBatch
from mcore_rl.megatron.step.outputs import TokenOutputs
from mcore_rl.types import Mean, Metric


def mtp_loss(
    chunk: torch.nn.Module, hidden: torch.Tensor, batch: MicroBatch, outputs: TokenOutputs, weight: float
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Compute the loss of multi-token-prediction layers (formula in model/mtp.py), a scalar with gradient, and the mean
    cross entropy over tokens and depths.

    weight: coefficient / (trained tokens) of the update on all ranks.

    Shapes: hidden [D * T, h], the hidden states of all depths.
    Units: nats.
    Collective: the tensor- and context-parallel groups.
    """
    model = unwrap(chunk)
    # Labels are token + 1, and 0 for positions without a trained token, because roll_tensor fills with 0.
    labels = torch.zeros_like(batch.tokens)
    labels[batch.predictors] = batch.targets + 1
    total, count = hidden.new_zeros((), dtype=torch.float32), 0
    for states in hidden.chunk(model.config.mtp_num_layers):
        labels, _ = roll_tensor(labels, cp_group=model.cp_group, packed_seq_params=batch.sequences)
        positions = labels.nonzero().squeeze(1)
        logp, _ = linear_logp_entropy(
            states.index_select(0, positions),
            # This loss must not train the output projection of the policy (see model/mtp.py).
            output_weight(chunk).detach(),
            labels[positions] - 1,
            chunk_tokens=outputs.chunk_tokens,
            group=outputs.group,
            compute_entropy=False,
            vocab_size=model.unpadded_vocab_size,
            float32_head=outputs.float32_head,
        )
        total, count = total - logp.sum(), count + len(positions)
    loss = total * (weight / model.config.mtp_num_layers)
    return loss, {"actor/mtp_loss": Mean(float(total.detach()), count)}
