"""Tokens that are chosen among all tokens of an update, before its first backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mcore_rl.megatron.model.attention.context import ContextPart
from mcore_rl.megatron.step.microbatches import MicroBatch


@dataclass(frozen=True)
class TokenChoice:
    """Tokens that are chosen among all tokens of an update, bool [n] by sample, for the tokens of this rank.

    of_loss: tokens that a loss with needs.selection treats differently; None for other losses.
    within: tokens that a correction with measure second_moment keeps; None: no such correction.
    kept: tokens whose policy loss is kept; None: all.
    """

    of_loss: Mapping[int, torch.Tensor] | None = None
    within: Mapping[int, torch.Tensor] | None = None
    kept: Mapping[int, torch.Tensor] | None = None


def joined_flags(batch: MicroBatch, chosen: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Join the flags of a micro-batch's samples, bool [N]."""
    no_tokens = batch.targets.new_empty(0, dtype=torch.bool)
    return torch.cat([no_tokens, *(chosen[sample] for sample in batch.samples)])


def samples_and_positions(batch: MicroBatch, context: ContextPart) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample of each trained token on this rank, and its position among the sample's trained tokens, int64 [N] each."""
    device = batch.tokens.device
    counts = torch.tensor(batch.whole_counts, dtype=torch.int64, device=device)
    samples = torch.tensor(batch.samples, dtype=torch.int64, device=device).repeat_interleave(counts)
    # Position of each token in the joined tokens minus the start of its sample.
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    positions = torch.arange(len(samples), device=device) - starts
    rank_tokens = slice(None) if context.size == 1 else batch.owners == context.rank
    return samples[rank_tokens], positions[rank_tokens]
