"""Attention of transformers' models within each sequence of a packed row, registered with transformers by name."""

from __future__ import annotations

from functools import lru_cache

import torch
from transformers import AttentionInterface

from mcore_rl.megatron.model.attention.packed import PackedRow, packed_attention, upload

PACKED = "mcore_rl_packed"
"""Value of attn_implementation. transformers builds no mask for it."""


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_seq_params: PackedRow,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention with the arguments of transformers' attention functions.

    Shapes: query [1, heads, T, d], key and value [1, groups, T, d], sinks s_aux [heads] -> [1, T, heads, d].
    """
    assert attention_mask is None
    assert module.is_causal
    assert not dropout
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    lengths = packed_seq_params.lengths
    return packed_attention(q, k, v, lengths, scale=scaling, window=sliding_window, sinks=s_aux)[None], None


AttentionInterface.register(PACKED, _attend)


# Cached tensors must not be inference tensors: backward passes use them too.
@lru_cache(maxsize=8)
@torch.inference_mode(False)
def positions(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the position of each token in its sequence, int64 [1, T]."""
    return upload(torch.cat([torch.arange(length) for length in lengths])[None], device)
