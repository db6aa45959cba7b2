"""Sums over groups of responses that are named by arbitrary, unsorted ids: no loop over groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Which of `num_groups` groups each response belongs to.

    Shapes: index int64 [B], values 0..num_groups-1; sizes int64 [num_groups].
    """

    index: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, group_ids: Tensor) -> Segments:
        """Shapes: group_ids int64 [B]."""
        # Groups mostly arrive as consecutive runs: only the runs' ids are sorted, G of them instead of B.
        run_ids, run_of = torch.unique_consecutive(group_ids, return_inverse=True)
        _, group_of_run = torch.unique(run_ids, return_inverse=True)
        index = group_of_run[run_of]
        return cls(index, torch.bincount(index))

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` [B] per group [num_groups]."""
        return values.new_zeros(len(self.sizes)).index_add_(0, self.index, values)

    def min(self, values: Tensor) -> Tensor:
        """Least of `values` [B] per group [num_groups]."""
        least = values.new_full((len(self.sizes),), torch.inf)
        return least.scatter_reduce_(0, self.index, values, "amin")

    def spread(self, per_group: Tensor) -> Tensor:
        """Each response's entry of `per_group` [num_groups], [B]."""
        return per_group[self.index]
