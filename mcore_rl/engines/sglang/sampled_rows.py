"""Sampling of a batch with the noise of engines.noise, entirely on the device of the probabilities: no step waits for
the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.engines.noise import device_noise_keys, sample_tokens


@dataclass(frozen=True)
class SampledRows:
    """Sampling parameters of the rows of a batch.

    positions: position of the token to sample, counted from the first token of the prompt.
    top_ks: 1 for greedy rows.
    Shapes: all [rows]; seeds int64, positions and top_ks integers, the others float.
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor


def sample_rows(probs: torch.Tensor, rows: SampledRows, *, truncate: bool) -> torch.Tensor:
    """Sample one token per row. With `truncate`, write the truncated and renormalised probabilities to `probs`, except
    in greedy rows.

    Shapes: probs float [rows, V] -> int32 [rows].
    """
    greedy = rows.top_ks == 1
    if truncate:
        kept = _truncated(probs, rows)
        probs.copy_(torch.where(greedy[:, None], probs, kept / kept.sum(-1, keepdim=True)))
    sampled = sample_tokens(probs, device_noise_keys(rows.seeds, rows.positions))
    return torch.where(greedy, probs.argmax(-1), sampled).to(torch.int32)


def _truncated(probs: torch.Tensor, rows: SampledRows) -> torch.Tensor:
    """Zero the probabilities of tokens below min-p, then outside top-k, then outside top-p of the rest, in the order of
    vLLM."""
    ordered, index = probs.sort(dim=-1, descending=True)
    ordered = ordered.masked_fill(ordered < ordered[:, :1] * rows.min_ps[:, None], 0.0)
    rank = torch.arange(probs.shape[1], device=probs.device)
    ordered = ordered.masked_fill(rank[None] >= rows.top_ks[:, None], 0.0)
    share = ordered / ordered.sum(-1, keepdim=True)
    # The mass of the tokens before each one: the token that crosses top_p is kept.
    ordered = ordered.masked_fill(share.cumsum(-1) - share >= rows.top_ps[:, None], 0.0)
    return torch.zeros_like(probs).scatter_(-1, index, ordered)
