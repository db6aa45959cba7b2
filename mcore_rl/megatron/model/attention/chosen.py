"""Latent attention to the tokens that an indexer chooses (DeepSeek-V3.2, GLM-5), on CPUs.

In sequences of at most index_topk tokens every query attends to all earlier tokens, with the kernels of other models.
In longer ones, blocks of queries compute the scores of all earlier tokens and mask the others, so there are as many
operations as in full attention. The backward pass computes each block again; only the choices are stored
(4 * index_topk bytes per token).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.utils.checkpoint import checkpoint

from mcore_rl.megatron.model.attention.indexer import Indexer
from mcore_rl.megatron.model.attention.packed import PackedRow, SDPACoreAttention, packed_attention

QUERIES = 128
"""Queries whose scores exist at the same time."""


@dataclass
class ChosenRow(PackedRow):
    """A packed row in one layer, with the tokens to which its queries attend (see Indexer.choose)."""

    chosen: torch.Tensor | None = None


class ChosenCoreAttention(SDPACoreAttention):
    """Core attention of packed rows to chosen tokens. Takes a ChosenRow."""

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__(config, layer_number, attn_mask_type, attention_type, softmax_scale, pg_collection)
        assert self.context.size == 1, "resolved.layout rejects context parallelism"
        assert pg_collection is not None
        self.indexer = Indexer(config, pg_collection.tp)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Compute causal attention; attention_mask is ignored.

        Shapes: query and key [T, heads, d], value [T, heads, e] -> [T, heads * e].
        """
        assert isinstance(packed_seq_params, ChosenRow)
        chosen, lengths = packed_seq_params.chosen, packed_seq_params.lengths
        if chosen is None:
            return super().forward(query, key, value, packed_seq_params=packed_seq_params)
        outputs = []
        for q, k, v, tokens in zip(*(x.split(lengths) for x in (query, key, value, chosen)), strict=True):
            if len(q) > tokens.shape[1]:
                outputs.append(chosen_attention(q, k, v, tokens, scale=self.scale))
            else:
                outputs.append(packed_attention(q, k, v, (len(q),), scale=self.scale))
        return torch.cat(outputs).flatten(1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, ShardedTensor]:
        """Describe the indexer in a checkpoint: whole tensors on every tensor-parallel rank."""
        assert metadata is not None
        described: dict[str, ShardedTensor] = make_sharded_tensors_for_checkpoint(
            self.indexer.state_dict(keep_vars=True),
            f"{prefix}indexer.",
            {},
            sharded_offsets,
            tp_group=self.indexer.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return described


def chosen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor, *, scale: float | None
) -> torch.Tensor:
    """Compute causal attention of one sequence to the chosen tokens. Differentiable.

    Shapes: query and key [n, heads, d], value [n, heads, e], chosen int32 [n, topk] -> [n, heads, e].
    scale: factor of the scores; None: 1 / sqrt(d).
    """
    outputs = []
    for start in range(0, len(query), QUERIES):
        end = min(start + QUERIES, len(query))
        block = query[start:end], key[:end], value[:end], chosen[start:end], scale
        if torch.is_grad_enabled():
            outputs.append(checkpoint(_attend, *block, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(_attend(*block))
    return torch.cat(outputs)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Compute the attention of consecutive queries, of which the last is at the position of the last key."""
    queries, keys = len(query), len(key)
    # Choices beyond the last key are the padding of queries with fewer visible tokens, which have chosen all of those.
    # Moved to the last key they are masked as later ones, except for the last query, which sees this key anyway.
    visible = torch.zeros(queries, keys, dtype=torch.bool, device=query.device)
    visible = visible.scatter(1, chosen.long().clamp(max=keys - 1), True).tril(keys - queries)
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale).transpose(0, 1)


class ChosenSelfAttention(MLASelfAttention):
    """Megatron's latent attention, which passes the indexer's choices to the core attention with the packed row.

    The row is copied for each layer and call: recomputation and other layers cannot see another layer's choices.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedRow | None = None,
        **options: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the layer's attention. Shapes: [T, 1, h] -> [T, 1, h]; with sequence parallelism T / tp instead of T.

        Collective: the tensor-parallel group.
        """
        assert packed_seq_params is not None, "this attention takes packed rows only"
        row = ChosenRow(**vars(packed_seq_params))
        return super().forward(hidden_states, attention_mask, packed_seq_params=row, **options)

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
        inference_context: object | None = None,
        **options: object,
    ) -> tuple[torch.Tensor, ...]:
        """Return query, key, value and both latents, and store the choices in the row."""
        tensors: tuple[torch.Tensor, ...] = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, inference_context, **options
        )
        assert isinstance(packed_seq_params, ChosenRow)
        lengths, latent = packed_seq_params.lengths, tensors[3]
        packed_seq_params.chosen = self.core_attention.indexer.choose(
            hidden_states[:, 0], latent, self._rotation(max(lengths)), lengths
        )
        return tensors

    def _rotation(self, length: int) -> torch.Tensor:
        """Return the rotations of the latent heads by position, complex64 [length, rotated / 2]."""
        angles, factor = self.rotary_pos_emb(length, packed_seq=True), 1.0
        if isinstance(angles, tuple):  # yarn
            angles, factor = angles
        # The embedding repeats the angles for the second half of a head.
        angles = angles[:, 0, 0].chunk(2, -1)[0].float()
        return torch.polar(torch.full_like(angles, factor), angles)


def use_chosen_attention(parts: TransformerLayerSubmodules) -> None:
    """Replace the latent attention in the specification of a local layer."""
    parts.self_attention.module = ChosenSelfAttention
    parts.self_attention.submodules.core_attention = ChosenCoreAttention
