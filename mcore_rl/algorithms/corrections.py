"""Importance corrections for the mismatch between the engine's sampling policy and the trainer's policy.

    d_t = old_logp_t - rollout_logp_t     trainer minus engine; the engine may have used older weights
    w   = exp(d_t)                        level token
          exp(sum_t d_t)                        sequence, the same for all tokens of a response
          exp(mean_t d_t)                       geometric
    truncate   w <- clip(w, low, high)          with low = 0: min(w, high)
    mask       w <- w where low <= w <= high, else 0

The per-token loss is multiplied by w; no gradient flows through w.

Source: truncated importance sampling, E. L. Ionides (2008), J. Comput. Graph. Stat. 17; between engine and trainer:
F. Yao et al. (2025), "Your efficient RL framework secretly brings you off-policy RL training" (token, truncate); J. Liu
et al. (2025), "When speed kills stability" (sequence and geometric, mask); effective sample size: L. Kish (1965).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import check_shapes, masked
from mcore_rl.config.algorithm import CorrectionConfig
from mcore_rl.types import EffectiveFraction, Max, Mean, Metric

MAX_LOG_WEIGHT = 20.0
"""Bound of the log weight. The product over a sequence may overflow; exp(20) is finite and beyond any useful bound."""


@dataclass(frozen=True)
class CorrectionResult:
    """Weights and metrics of a correction.

    weights: factors of the per-token loss, shaped like the mask; 0 where mask is 0.
    metrics: weight_mean and weight_max before bounding (the expected mean is 1); effective_sample_fraction of the
    bounded weights; truncated_fraction or masked_fraction, the share out of bounds. They count tokens at level token,
    otherwise responses with at least one trained token.
    """

    weights: Tensor
    metrics: dict[str, Metric]


@dataclass(frozen=True)
class Correction:
    """Importance correction of kind truncate or mask."""

    config: CorrectionConfig

    @property
    def needs_whole_sequence(self) -> bool:
        """True if all tokens of a response must be in one call, one response per row."""
        return self.config.level != "token"

    @torch.no_grad()
    def __call__(self, *, old_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> CorrectionResult:
        """Compute weights and metrics.

        Shapes: all [B, T]; any one shape at level token.
        Raises: ValueError for a wrong shape.
        """
        check_shapes("old_logp", old_logp.shape, rollout_logp=rollout_logp, mask=mask)
        if self.needs_whole_sequence and old_logp.dim() != 2:
            raise ValueError(
                f"a correction of level {self.config.level} takes one response per row, not {list(old_logp.shape)}"
            )
        selected = mask > 0
        difference = masked(old_logp.detach() - rollout_logp, selected).double()
        if self.config.level == "token":
            counted = selected
        else:
            length = selected.sum(-1)
            counted = length > 0
            difference = difference.sum(-1)
            if self.config.level == "geometric":
                difference = difference / length.clamp(min=1)
        # Clamp before exp: an infinite weight would make the metrics infinite even if it is masked afterwards.
        weights = masked(difference.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp(), counted)
        # Metrics need the weights before bounding as well: their expected mean is 1.
        applied, outside = self._bounded(weights, counted)
        spread = applied if self.config.level == "token" else masked(applied[:, None].expand(selected.shape), selected)
        return CorrectionResult(spread.to(old_logp.dtype), self._metrics(weights, applied, outside, counted))

    def _bounded(self, weights: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.config.bounds
        outside = counted & ((weights < low) | (weights > high))
        if self.config.kind == "mask":
            return weights.masked_fill(outside, 0.0), outside
        return masked(weights.clamp(low, high), counted), outside

    def _metrics(self, weights: Tensor, applied: Tensor, outside: Tensor, counted: Tensor) -> dict[str, Metric]:
        largest = weights.amax() if weights.numel() else weights.sum()
        sums = [weights.sum(), applied.sum(), applied.square().sum(), largest]
        counts = [outside.count_nonzero().double(), counted.count_nonzero().double()]
        # One device-to-host transfer instead of one per number.
        total, kept, squares, greatest, beyond, count = torch.stack([*sums, *counts]).tolist()
        share = "truncated_fraction" if self.config.kind == "truncate" else "masked_fraction"
        return {
            "weight_mean": Mean(total, count),
            "weight_max": Max(greatest),
            "effective_sample_fraction": EffectiveFraction(kept, squares, count),
            share: Mean(beyond, count),
        }
