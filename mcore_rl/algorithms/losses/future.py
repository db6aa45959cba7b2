"""Losses that weight a token by the change of the policy on the tokens after it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked
from mcore_rl.algorithms.losses.surrogate import (
    SECTION,
    bounded_exp,
    check_bounds,
    check_dual_clip,
    check_positive,
    clipped_surrogate,
    ratio_inputs,
    ratio_metrics,
    split_by_sign,
)
from mcore_rl.errors import ConfigError

SAFE_WEIGHTS = (0.8, 1.0)
"""Range of the weight of a token with negative advantage whose ratio is above safety_ratio."""
BLOCK = 64
"""Entries of a row that are summed by one product of matrices."""


@dataclass(frozen=True)
class FIPO:
    """FIPO: weights each token's advantage by the discounted log ratios of the response from that token on.

        d_t = logp_t - old_logp_t,   r_t = exp(d_t)                              ratio to the old policy
        F_t = sum_{k >= t} gamma^(k - t) [r_k <= dual_clip] d_k,   gamma = 2^(-1 / decay_tokens)
        f_t = sg[clip(exp(F_t), 1 - influence_low, 1 + influence_high)]         sg: stop-gradient
              A_t < 0 and r_t > safety_ratio:   clip(f_t, 0.8, 1)
        L_t = PPO's clipped surrogate with dual clip (see ppo_clip), with f_t A_t instead of A_t

    Sums run over the trained tokens of a response, and k - t counts trained tokens. While the policy equals the old
    one, as in the first update of a batch, f is 1.

    clip_low, clip_high: see ppo_clip. dual_clip: see ppo_clip; tokens with a larger ratio are left out of F.
    decay_tokens: distance after which a token's log ratio counts half. influence_low, influence_high: distances of the
    bounds of f from 1.

    Metrics: ratio_metrics; dual_clip_fraction; influence_weight, the mean of f; future_kl, the mean of F in nats.

    Source: arXiv 2603.19835, equations 5 to 8, with the values of the 32B run in table 2 (f between 1 and 1.2,
    half-life 32, dual clip 10), but safety_ratio: 10 in table 2, 4 as the default of ms-swift ("FIPO"). The range 0.8
    to 1 is from the authors' code; the paper sets f to 1. Their code also drops a response with more than one token
    at the dual clip, and k - t counts all tokens. The paper aggregates by token-mean.
    Shapes: [B, T], one whole response per row.
    """

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True, whole_sequence=True)

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 10.0
    decay_tokens: float = 32.0
    influence_low: float = 0.0
    influence_high: float = 0.2
    safety_ratio: float = 10.0

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)
        check_dual_clip(self.dual_clip)
        check_positive(decay_tokens=self.decay_tokens, safety_ratio=self.safety_ratio)
        if not 0 <= self.influence_low < 1:
            raise ConfigError(f"{SECTION}.influence_low={self.influence_low} must be at least 0 and less than 1")
        if not 0 <= self.influence_high < math.inf:
            raise ConfigError(f"{SECTION}.influence_high={self.influence_high} must be finite and at least 0")

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs)
        with torch.no_grad():
            capped = log_ratio > math.log(self.dual_clip)
            future = discounted_future(log_ratio.masked_fill(capped, 0.0), selected, 2 ** (-1 / self.decay_tokens))
            weight = bounded_exp(future).clamp(1 - self.influence_low, 1 + self.influence_high)
            unsafe = (advantages < 0) & (log_ratio > math.log(self.safety_ratio))
            weight = masked(torch.where(unsafe, weight.clamp(*SAFE_WEIGHTS), weight), selected)
        # weight > 0, so the sign of the advantage, which decides the side of the clip, does not change.
        result = clipped_surrogate(log_ratio, weight * advantages, self.clip_low, self.clip_high, self.dual_clip)
        means = {"influence_weight": weight, "future_kl": future}
        if result.capped is not None:
            means["dual_clip_fraction"] = result.capped
        flags = split_by_sign(result.clipped, advantages)
        return PolicyLossResult(result.loss, ratio_metrics(log_ratio.detach(), selected, **flags, **means))


def discounted_future(values: Tensor, selected: Tensor, gamma: float) -> Tensor:
    """Sum values from each selected entry to the end of its row, with the factor gamma^d for a distance of d selected
    entries. 0 where not selected.

    Shapes: values, selected (bool) [B, T] -> [B, T].
    """
    if not values.numel():
        return values
    if bool((selected[:, 1:] <= selected[:, :-1]).all()):
        # Each row begins with its selected entries, as in training: nothing needs to move.
        return masked(_suffix_sums(masked(values, selected), gamma), selected)
    # Selected entries first, in their order, so that distances count selected entries only; others in a last column.
    length = values.shape[-1]
    place = (selected.cumsum(-1) - 1).masked_fill(~selected, length)
    sums = values.new_zeros(values.shape[0], length + 1).scatter_(-1, place, values)[:, :length]
    sums = _suffix_sums(sums, gamma)
    return masked(torch.nn.functional.pad(sums, (0, 1)).gather(-1, place), selected)


def _suffix_sums(values: Tensor, gamma: float) -> Tensor:
    """Sum values from each entry to the end of its row, with the factor gamma^d for a distance of d entries.

    Blocks of entries are summed by one product of matrices, and the first entries of the blocks in the same way.

    Shapes: [B, T] -> [B, T].
    """
    rows, length = values.shape
    blocks = torch.nn.functional.pad(values, (0, -length % BLOCK)).view(rows, -1, BLOCK)
    index = torch.arange(BLOCK, device=values.device, dtype=torch.float64)
    # Negative distances would overflow for a small gamma; tril removes them anyway.
    powers = (gamma ** (index[:, None] - index).clamp(min=0)).tril().to(values.dtype)
    sums = blocks @ powers
    if sums.shape[1] > 1:
        later = _suffix_sums(sums[:, :, 0], gamma**BLOCK)[:, 1:, None]
        sums[:, :-1] += later * (gamma ** (BLOCK - index)).to(values.dtype)
    return sums.view(rows, -1)[:, :length]
