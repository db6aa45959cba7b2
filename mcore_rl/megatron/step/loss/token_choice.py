"""Tokens that are chosen among all tokens of an update, and other results that depend on the whole update, before its
first backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mcore_rl.megatron.step.loss.trained_tokens import TrainedTokens


@dataclass(frozen=True)
class TokenChoice:
    """Results for one loss that depend on the whole update, by sample. Tokens are bool [n], this rank's only.

    of_loss: tokens that a loss with needs.selection treats differently; None for other losses.
    within: tokens that a correction with measure second_moment keeps; None: no such correction.
    kept: tokens whose policy loss is kept; None: all.
    groups: group_loss and slope (see PolicyLossInputs) of each sample, for a loss with needs.whole_group; else None.
    """

    of_loss: Mapping[int, torch.Tensor] | None = None
    within: Mapping[int, torch.Tensor] | None = None
    kept: Mapping[int, torch.Tensor] | None = None
    groups: Mapping[int, tuple[float, float]] | None = None


def joined_flags(batch: TrainedTokens, chosen: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Join the flags of a micro-batch's samples, bool [N]."""
    no_tokens = batch.targets.new_empty(0, dtype=torch.bool)
    return torch.cat([no_tokens, *(chosen[sample] for sample in batch.samples)])


def joined_terms(batch: TrainedTokens, groups: Mapping[int, tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return group_loss and slope of each token of a micro-batch, float32 [N] each."""
    device = batch.targets.device
    counts = torch.tensor(batch.trained_counts, dtype=torch.int64, device=device)
    terms = [groups[sample] for sample in batch.samples]
    table = torch.tensor(terms, dtype=torch.float32, device=device).view(-1, 2).repeat_interleave(counts, dim=0)
    return table[:, 0], table[:, 1]
