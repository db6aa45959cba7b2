"""Megatron's gated delta net with packed rows, and the self-attention beside it whose outputs are gated.

| tensor of a layer | shape on a rank | rows |
|---|---|---|
| `in_proj.weight` | [(2 keys + 2 values + 2 value heads) / tp, h] | query, key, value, gate z, strength b, decay a |
| `conv1d.weight` | [(2 keys + values) / tp, 1, width] | query, key, value |
| `A_log`, `dt_bias` | [value heads / tp] | |
| `out_norm.weight` | [value size] | replicated |
| `out_proj.weight` | [h, values / tp] | |

A layer saves the outputs of in_proj and the input of out_proj only, and recomputes the rest in the backward pass:
convolution, triangular systems and states are several times as large, and cheap beside the projections.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from mcore_rl.megatron.model.attention.packed import PackedRow
from mcore_rl.megatron.model.linear_attention.chunks import causal_convolution
from mcore_rl.megatron.model.linear_attention.delta_rule import gated_delta_rule
from mcore_rl.megatron.model.norm import LocalRMSNorm


class OutputNorm(LocalRMSNorm):
    """Norm of the heads' outputs with one replicated weight; also beside TransformerEngine's layers, whose norms are
    zero-centered in this model.

    Each tensor-parallel rank applies the weight to its own heads. megatron-core 0.16.1 sums the ranks' gradients with
    sequence parallelism only (NVIDIA/Megatron-LM#7452); without it, this module sums them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **options: object) -> None:
        super().__init__(config, hidden_size, eps, **options)
        self.sums_gradients = config.tensor_model_parallel_size > 1 and not config.sequence_parallel

    def factor(self) -> torch.Tensor:
        return copy_to_tensor_model_parallel_region(self.weight) if self.sums_gradients else self.weight


class PackedGatedDeltaNet(GatedDeltaNet):
    """Gated delta net whose convolution and state start anew in each sequence of a packed row, which megatron-core
    0.16.1 rejects. Parameters, sharding and checkpoint are Megatron's."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the layer; attention_mask and rotations are ignored.

        Shapes: [T, 1, h] -> [T, 1, h]; with sequence parallelism T / tp instead of T.
        Collective: the tensor-parallel group.
        """
        assert packed_seq_params is not None, "this attention takes packed rows only"
        projected, _bias = self.in_proj(hidden_states)
        lengths = packed_seq_params.lengths
        if torch.is_grad_enabled():
            mixed = checkpoint(self._mix, projected, lengths, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._mix(projected, lengths)
        return self.out_proj(mixed)

    def _mix(self, projected: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        """Compute out_proj's input. Shapes: [T, 1, outputs of in_proj] -> [T, 1, values / tp]."""
        keys, values, heads = (n // self.tp_size for n in (self.qk_dim, self.v_dim, self.num_value_heads))
        qkv, gate, strength, decay = projected[:, 0].split((2 * keys + values, values, heads, heads), -1)
        qkv = self.act_fn(causal_convolution(qkv, self.conv1d.weight, lengths))
        query, key, value = (
            part.unflatten(1, (-1, size))
            for part, size in zip(
                qkv.split((keys, keys, values), -1),
                (self.key_head_dim, self.key_head_dim, self.value_head_dim),
                strict=True,
            )
        )
        # Each key head serves several value heads.
        repeats = self.num_value_heads // self.num_key_heads
        query, key = (_unit(part).repeat_interleave(repeats, 1) for part in (query, key))
        # float32 whatever the dtype of the weights: exp of a rounded A_log would be off by its relative error.
        log_decay = -self.A_log.float().exp() * F.softplus(decay.float() + self.dt_bias.float())
        outputs = gated_delta_rule(query, key, value, log_decay, strength.sigmoid(), lengths)
        normed = self.out_norm(outputs)
        gated = (normed * self.act_fn(gate.float()).view_as(normed)).to(projected.dtype)
        return gated.flatten(1).unsqueeze(1)


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    """Divide by the Euclidean norm, in float32, with the epsilon of transformers."""
    wide = vectors.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(vectors.dtype)


class GatedSelfAttention(SelfAttention):
    """Self-attention whose outputs are multiplied by the sigmoid of a gate.

    megatron-core 0.16.1 projects the gates of a whole group of heads. With more tensor-parallel ranks than groups it
    selects the rank's part of the queries, but not of the gates.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[torch.Tensor, ...] | tuple[torch.Tensor, list[int]]:
        """Return query, key, value and, with output_gate, the gate [T, 1, heads of this rank, head size]."""
        parts = super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        groups = self.config.num_query_groups
        if not output_gate or groups is None or groups >= self.world_size:
            return parts
        query, key, value, gate = parts
        rank = parallel_state.get_tensor_model_parallel_rank() % (self.world_size // groups)
        return query, key, value, gate.narrow(2, rank * query.shape[2], query.shape[2])
