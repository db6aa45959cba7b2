"""Tokens that are chosen among all tokens of an update, before its first backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

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
