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
        from mcore_rl.algorithms.kernels import group_numbers

        return cls(*group_numbers(group_ids))

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` [B] per group [num_groups]."""
        return values.new_zeros(len(self.sizes)).index_add_(0, self.index, values)

    def min(self, values: Tensor) -> Tensor:
        """Least of `values` [B] per group [num_groups]."""
        return self._extreme(values, "amin", torch.inf)

    def max(self, values: Tensor) -> Tensor:
        """Greatest of `values` [B] per group [num_groups]."""
        return self._extreme(values, "amax", -torch.inf)

    def spread(self, per_group: Tensor) -> Tensor:
        """Each response's entry of `per_group` [num_groups], [B]."""
        return per_group[self.index]

    def above_least(self, values: Tensor) -> Tensor:
        """`values` [B] measured from the least of their group: equal ones are 0 before any rounding, and so is every
        mean of them, weighted or not."""
        return values - self.spread(self.min(values))

    def centred(self, values: Tensor) -> Tensor:
        """`values` [B] less the mean of their group; exactly 0 where all of a group are equal."""
        return self.centred_and_std(values)[0]

    def centred_and_std(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Centred `values` [B], and per group [num_groups] their sample standard deviation (n - 1), of one value 0."""
        from mcore_rl.algorithms.kernels import centred_in_groups

        centred, squares = centred_in_groups(values, self.index, self.sizes)
        return centred, (squares / (self.sizes - 1).clamp(min=1)).sqrt()

    def _extreme(self, values: Tensor, reduce: str, start: float) -> Tensor:
        return values.new_full((len(self.sizes),), start).scatter_reduce_(0, self.index, values, reduce)
