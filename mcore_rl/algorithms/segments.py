"""Vectorized reductions over groups of responses. Group ids are arbitrary and unsorted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Assignment of responses to groups.

    Shapes: index int64 [B], the group of each response, 0..num_groups-1; sizes int64 [num_groups].
    """

    index: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, group_ids: Tensor) -> Segments:
        """Number the groups of `group_ids`, int64 [B]."""
        # Inside the function: numba is slow to import.
        from mcore_rl.algorithms.kernels import group_numbers

        return cls(*group_numbers(group_ids))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums of `values` [B] per group, [num_groups]."""
        return values.new_zeros(len(self.sizes)).index_add_(0, self.index, values)

    def min(self, values: Tensor) -> Tensor:
        """Return the minimum of `values` [B] per group, [num_groups]."""
        return self._extreme(values, "amin", torch.inf)

    def max(self, values: Tensor) -> Tensor:
        """Return the maximum of `values` [B] per group, [num_groups]."""
        return self._extreme(values, "amax", -torch.inf)

    def expand(self, per_group: Tensor) -> Tensor:
        """Expand `per_group` [num_groups] to responses, [B]."""
        return per_group[self.index]

    def above_minimum(self, values: Tensor) -> Tensor:
        """Subtract the minimum of each group from `values` [B]. In a group of equal values the results, and weighted
        means of them, are exactly 0 without rounding errors."""
        return values - self.expand(self.min(values))

    def centred(self, values: Tensor) -> Tensor:
        """Subtract the mean of each group from `values` [B]; exactly 0 for a group of equal values."""
        return self.centred_and_std(values)[0]

    def centred_and_std(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return centred `values` [B], and the sample standard deviation (n - 1) per group, [num_groups]; 0 for one
        value."""
        from mcore_rl.algorithms.kernels import centred_in_groups

        centred, squares = centred_in_groups(values, self.index, self.sizes)
        # A group of one value has a sum of squares of 0, so its divisor does not matter.
        return centred, (squares / (self.sizes - 1).clamp(min=1)).sqrt()

    def _extreme(self, values: Tensor, reduce: str, start: float) -> Tensor:
        # `start` is neutral for the reduction, which includes it.
        return values.new_full((len(self.sizes),), start).scatter_reduce_(0, self.index, values, reduce)
