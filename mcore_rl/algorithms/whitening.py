"""Advantages with mean 0 and standard deviation 1 over every trained token of a batch, also one spread over ranks.

    A' = (A - mean) / sqrt(var + eps),    var the sample variance (n - 1)

`Moments` of parts add up to the moments of the whole, so ranks that hold parts of a batch exchange three numbers. They
hold mean and squared distances instead of plain sums: sums of squares lose a spread that is small beside the mean.

Source: advantage normalisation, arXiv 2006.05990; merging, Chan, Golub and LeVeque 1983.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import AdvantageInputs, AdvantageResult

VARIANCE_EPS = 1e-8


@dataclass(frozen=True)
class Moments:
    """Of the trained tokens of a batch or a part of one: how many, their mean, and the sum of their squared distances
    from it. Without tokens all three are 0."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor, mask: Tensor, lengths: Tensor | None = None) -> Moments:
        """Of `values` where mask > 0, as one token each; with `lengths`, row i stands for lengths[i] tokens.

        Shapes: values, mask [B, T]; lengths [B].
        """
        from mcore_rl.algorithms.kernels import weighted_moments

        weights = torch.ones(len(values), dtype=torch.float64)
        if lengths is not None:
            weights = lengths.double() / (mask > 0).sum(-1).clamp(min=1)
        return cls(*weighted_moments(values, mask, weights))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        shift = other.mean - self.mean
        squares = self.squares + other.squares + shift * shift * self.count * other.count / count
        return Moments(count, self.mean + shift * (other.count / count), squares)

    @property
    def variance(self) -> float:
        return self.squares / (self.count - 1) if self.count > 1 else 0.0

    def as_tensor(self) -> Tensor:
        """float64 [3]. To be gathered: the sum of such tensors means nothing."""
        return torch.tensor([self.count, self.mean, self.squares], dtype=torch.float64)

    @classmethod
    def merged(cls, rows: Tensor) -> Moments:
        """Of all ranks' as_tensor(): the same bits on every rank that adds the same rows.

        Shapes: rows [ranks, 3], as all_gather gives them, or all_reduce (sum) where each rank has filled only its row.
        """
        return sum((cls(*row) for row in rows.tolist()), cls())


def whiten(advantages: Tensor, mask: Tensor, moments: Moments) -> Tensor:
    """`advantages` by the given moments where mask > 0, and 0 elsewhere. Equal advantages become exactly 0.

    Shapes: all [B, T].
    """
    from mcore_rl.algorithms.kernels import standardised

    return standardised(advantages, mask, moments.mean, math.sqrt(moments.variance + VARIANCE_EPS))


def whiten_batch(raw: AdvantageResult, inputs: AdvantageInputs) -> AdvantageResult:
    """`raw` with its advantages whitened by their own moments, where `inputs` are the whole batch."""
    moments = Moments.of(raw.advantages, inputs.mask, inputs.lengths)
    return AdvantageResult(whiten(raw.advantages, inputs.mask, moments), raw.returns)
