"""Scores of all responses of an update, for losses that compare the responses of a group.

A micro-batch or rank sees only its own tokens, and the gradient must not depend on how the update is split. Before the
first backward pass, every rank therefore adds its tokens to one table with a row per response of the batch, and the
table is summed over the ranks. All ranks then compute the same terms of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import PolicyLoss
from mcore_rl.algorithms.selection import AllReduce, one_rank


class WholeGroupLoss(PolicyLoss, Protocol):
    """A policy loss with needs.whole_group."""

    def group_terms(self, scores: Tensor, signs: Tensor, group_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the loss of each response's group and the factor of the gradient of the response's tokens.

        Shapes: scores, signs float64 [B]; group_ids int64 [B]; None: one group -> float64 [B] each.
        """
        ...


@torch.no_grad()
def group_terms(
    loss: WholeGroupLoss,
    parts: Sequence[tuple[Tensor, Tensor, Tensor]],
    groups: Mapping[int, int],
    num_samples: int,
    *,
    device: torch.device | str = "cpu",
    all_reduce: AllReduce = one_rank,
) -> dict[int, tuple[float, float]]:
    """Compute the terms of a loss for each sample in `groups`, from all responses of the update.

    parts: sample, log ratio and advantage of the trained tokens of this rank. groups: group of each sample of this
    rank, also of those without tokens on it. num_samples: larger than any sample, the same on all ranks. The score of a
    response is the mean of the log ratios of its tokens on all ranks, its sign the sign of the sum of their advantages.
    Responses without tokens have terms of 0 and do not count.

    Shapes: parts [N] each. Collective: all ranks that all_reduce sums over; each token is on exactly one of them.
    """
    known = torch.tensor(list(groups), dtype=torch.int64)
    # Columns: sums of log ratios and advantages, number of tokens; sum of the group's number over the ranks that know
    # it, and number of these ranks.
    table = torch.zeros(num_samples, 5, dtype=torch.float64)
    table[known, 3], table[known, 4] = torch.tensor(list(groups.values()), dtype=torch.float64), 1.0
    table = table.to(device)
    for samples, log_ratio, advantages in parts:
        columns = torch.stack([log_ratio.double(), advantages.double(), torch.ones_like(log_ratio).double()], -1)
        table[:, :3].index_add_(0, samples, columns)
    log_ratio, advantages, tokens, numbers, ranks = all_reduce(table).cpu().unbind(-1)
    counted = tokens > 0
    ids = (numbers[counted] / ranks[counted]).round().long()
    terms = torch.zeros(2, num_samples, dtype=torch.float64)
    terms[:, counted] = torch.stack(loss.group_terms(log_ratio[counted] / tokens[counted], advantages[counted], ids))
    return dict(zip(groups, zip(*terms[:, known].tolist(), strict=True), strict=True))
