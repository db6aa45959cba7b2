"""Whitening: advantages with mean 0 and standard deviation 1 over all trained tokens of a batch and all ranks.

    A' = (A - mean) / sqrt(var + eps),    var: sample variance (n - 1)

`Moments` of parts can be added, so ranks exchange only three numbers. They store the mean and squared deviations
instead of plain sums, because a sum of squares loses precision if the variance is small compared to the mean.

Source: advantage normalisation, arXiv 2006.05990; merging, Chan, Golub and LeVeque 1983.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import AdvantageInputs, AdvantageResult

# Keeps the division finite if all advantages are equal, and is negligible otherwise.
VARIANCE_EPS = 1e-8


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the trained tokens of a batch or part of a batch; all 0 without
    tokens."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor, mask: Tensor, lengths: Tensor | None = None) -> Moments:
        """Compute the moments of `values` where mask > 0. With `lengths`, row i counts as lengths[i] tokens.

        Shapes: values, mask [B, T]; lengths [B].
        """
        from mcore_rl.algorithms.kernels import weighted_moments

        weights = torch.ones(len(values), dtype=torch.float64)
        if lengths is not None:
            # A row with one masked entry stands for lengths[i] tokens; one with n entries has lengths[i] / n each.
            weights = lengths.double() / (mask > 0).sum(-1).clamp(min=1)
        return cls(*weighted_moments(values, mask, weights))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        # Chan et al.: the distance between the two means adds to the squared deviations.
        shift = other.mean - self.mean
        squares = self.squares + other.squares + shift * shift * self.count * other.count / count
        return Moments(count, self.mean + shift * (other.count / count), squares)

    @property
    def variance(self) -> float:
        return self.squares / (self.count - 1) if self.count > 1 else 0.0

    def as_tensor(self) -> Tensor:
        """Count, mean and squares as float64 [3], to be gathered and merged; their plain sum has no meaning."""
        return torch.tensor([self.count, self.mean, self.squares], dtype=torch.float64)

    @classmethod
    def merged(cls, rows: Tensor) -> Moments:
        """Merge the as_tensor() rows of all ranks; bitwise the same on every rank.

        Shapes: rows [ranks, 3], from all_gather, or from a summing all_reduce in which each rank filled only its row.
        """
        # In the order of the ranks, so that every rank rounds in the same way.
        return sum((cls(*row) for row in rows.tolist()), cls())


def whiten(advantages: Tensor, mask: Tensor, moments: Moments) -> Tensor:
    """Whiten `advantages` with the given moments where mask > 0; 0 elsewhere. Equal advantages become exactly 0.

    Shapes: all [B, T].
    """
    from mcore_rl.algorithms.kernels import standardised

    return standardised(advantages, mask, moments.mean, math.sqrt(moments.variance + VARIANCE_EPS))


def whiten_batch(raw: AdvantageResult, inputs: AdvantageInputs) -> AdvantageResult:
    """Whiten the advantages of `raw` with their own moments. `inputs` must be the whole batch."""
    moments = Moments.of(raw.advantages, inputs.mask, inputs.lengths)
    return AdvantageResult(whiten(raw.advantages, inputs.mask, moments), raw.returns)
