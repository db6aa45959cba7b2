"""Importance corrections for the mismatch between the engine's sampling policy and the trainer's policy.

    d_t = old_logp_t - rollout_logp_t     trainer minus engine; the engine may have used older weights. With policy
                                          current: logp_t - rollout_logp_t, the trainer's policy at this update
    w   = exp(d_t)                        level token
          exp(sum_t d_t)                        sequence, the same for all tokens of a response
          exp(mean_t d_t)                       geometric
    truncate   f = clip(w, low, high)           with low = 0: min(w, high)
    mask       f = w where low <= w <= high, else 0
    reject     f = 1 where low <= w <= high, else 0
               level any_token: f = 1 for a response of which every token is within the bounds, else 0
               measure k2, k3: the bounds limit d_t^2 / 2 or exp(d_t) - 1 - d_t at level token and any_token, their sum
               over the response at level sequence, their mean at level geometric
               measure bernoulli_kl: the bounds limit max(KL(p || q), KL(q || p)) instead of w, for p = (P, 1 - P) and
               q = (Q, 1 - Q), the probabilities P of the trainer and Q of the engine of the sampled token
               measure second_moment: the tokens with the largest d_t^2 of the whole update are dropped, as few as
               possible, so that the mean of d_t^2 over the kept tokens is at most high
               negative_only: f = 1 where the advantage (above level token: the sum over the response) is not negative

Metrics of each correction, `correction/NAME`, or `correction/0_NAME` and so on for a list: weight_mean and weight_max
before bounding; effective_sample_fraction of f; masked_fraction (truncated_fraction), the share out of bounds; kl and
kl_low_var, the k1 and k3 estimates of KL(engine || trainer), and kl_reverse and kl_reverse_low_var, of KL(trainer ||
engine), over the tokens with f > 0: what the correction leaves. `rollout/kl` and so on cover all tokens.

The per-token loss is multiplied by f; no gradient flows through f. Several corrections multiply their factors; each is
computed from all trained tokens, so their order does not change the loss. Dropped tokens still count in the loss's
denominator.

Source: truncated importance sampling, E. L. Ionides (2008), J. Comput. Graph. Stat. 17; between engine and trainer:
F. Yao et al. (2025), "Your efficient RL framework secretly brings you off-policy RL training" (token, truncate); J. Liu
et al. (2025), "When speed kills stability" (sequence and geometric, mask and reject); Ring team (2025), IcePop (token,
mask with 0.5 and 5), and (2026), KPop (bernoulli_kl above 2); DeepSeek-V3.2, arXiv 2512.02556, off-policy sequence mask
(geometric, reject, negative_only, policy current, low = exp(-delta), no upper bound: its mean of log(Q / P) above delta
drops a response); M2PO, arXiv 2510.01161 (second_moment, policy current, high = 0.04; the authors' code instead
considers only tokens that the update would move further away, and clips their ratios, with bounds of at most 0.7 and at
least 1.5); k2 and k3: J. Schulman, "Approximating KL divergence" (2020), and as bounds verl (token_k2 to seq_max_k3);
effective sample size: L. Kish (1965).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import PolicyLoss, PolicyLossInputs, PolicyLossResult, check_shapes, masked
from mcore_rl.algorithms.kl import sums_in_both_directions
from mcore_rl.algorithms.selection import mean_bound
from mcore_rl.config.algorithm import CorrectionConfig
from mcore_rl.types import EffectiveFraction, Max, Mean, Metric

MAX_LOG_WEIGHT = 20.0
"""Bound of the log weight. The product over a sequence may overflow; exp(20) is finite and beyond any useful bound."""
LARGEST_LOGP = -1e-12
"""Upper bound of log-probabilities in the KL of two outcomes: the probability of the other tokens needs a logarithm."""

DIVERGENCES = ("kl", "kl_low_var", "kl_reverse", "kl_reverse_low_var")
"""Names of the results of sums_in_both_directions."""


@dataclass(frozen=True)
class CorrectionResult:
    """Factors and metrics of a correction.

    weights: factors of the per-token loss, shaped like the mask; 0 where mask is 0.
    metrics: weight_mean and weight_max before bounding (the expected mean of the ratio is 1; at level any_token, of the
    response's largest token); effective_sample_fraction of the factors; truncated_fraction or masked_fraction, the
    share out of bounds. They count tokens at level token, otherwise responses with at least one trained token. kl,
    kl_low_var, kl_reverse and kl_reverse_low_var count tokens whose factor is not 0.
    """

    weights: Tensor
    metrics: dict[str, Metric]


@dataclass(frozen=True)
class _Units:
    """Tokens or responses that a correction bounds, float64, in one shape.

    counted: those with trained tokens. lowest, highest: the values that must be within the bounds; they differ at level
    any_token only. negative: those with negative advantages; None: not needed.
    """

    counted: Tensor
    lowest: Tensor
    highest: Tensor
    negative: Tensor | None


@dataclass(frozen=True)
class Correction:
    """Importance correction of kind truncate, mask or reject."""

    config: CorrectionConfig

    @property
    def needs_whole_sequence(self) -> bool:
        """True if all tokens of a response must be in one call, one response per row."""
        return self.config.level != "token"

    @property
    def needs_old_logp(self) -> bool:
        """True if the log-probabilities before the first update are needed."""
        return self.config.policy == "old"

    @property
    def chooses_tokens(self) -> bool:
        """True if the tokens that are kept depend on all tokens of the update."""
        return self.config.measure == "second_moment"

    def second_moments(self, inputs: PolicyLossInputs) -> Tensor:
        """Return the squared log weight of each token, float32, 0 for tokens that are not trained."""
        trainer = inputs.old_logp if self.needs_old_logp else inputs.logp
        assert trainer is not None
        assert inputs.rollout_logp is not None
        return masked(trainer - inputs.rollout_logp, inputs.mask > 0).detach().square().float()

    @torch.no_grad()
    def __call__(
        self,
        *,
        rollout_logp: Tensor,
        mask: Tensor,
        old_logp: Tensor | None = None,
        logp: Tensor | None = None,
        advantages: Tensor | None = None,
        within: Tensor | None = None,
    ) -> CorrectionResult:
        """Compute factors and metrics. Needs old_logp or logp, depending on config.policy, and advantages if
        config.negative_only is set. within: see PolicyLossInputs.

        Shapes: all [B, T]; any one shape at level token.
        Raises: ValueError for a wrong shape or a missing tensor.
        """
        name, trainer = ("old_logp", old_logp) if self.needs_old_logp else ("logp", logp)
        if trainer is None or (self.config.negative_only and advantages is None):
            raise ValueError(f"a correction needs {name if trainer is None else 'advantages'}")
        check_shapes(name, trainer.shape, rollout_logp=rollout_logp, mask=mask, advantages=advantages)
        if self.needs_whole_sequence and trainer.dim() != 2:
            raise ValueError(
                f"a correction of level {self.config.level} takes one response per row, not {list(trainer.shape)}"
            )
        selected = mask > 0
        policy, engine = masked(trainer, selected).double(), masked(rollout_logp, selected).double()
        units = self._units(policy, engine, selected)
        if self.config.negative_only and advantages is not None:
            signs = masked(advantages, selected).double()
            units = replace(units, negative=(signs.sum(-1) if self.needs_whole_sequence else signs) < 0)
        if self.chooses_tokens and within is None:
            squared = masked(trainer - rollout_logp, selected).square().float()
            within = squared <= mean_bound(squared[selected], self.config.bounds[1])
        applied, outside = self._bounded(units, within)
        spread = masked(applied[:, None].expand(selected.shape), selected) if self.needs_whole_sequence else applied
        kept = selected & (spread != 0)
        left = (masked(policy, kept), masked(engine, kept))  # equal tokens add 0
        estimates = [*sums_in_both_directions(*left), kept.count_nonzero().double()]
        return CorrectionResult(spread.to(trainer.dtype), self._metrics(units, applied, outside, estimates))

    def _units(self, trainer: Tensor, engine: Tensor, selected: Tensor) -> _Units:
        """Compute the bounded quantity of tokens or responses. Tokens that are not selected have equal values."""
        level = self.config.level
        if level in ("token", "any_token"):
            values = masked(self._of_tokens(trainer, engine), selected)
            if level == "token":
                return _Units(selected, values, values, None)
            counted = selected.any(-1)
            lowest = values.masked_fill(~selected, torch.inf).amin(-1) if values.numel() else values.sum(-1)
            highest = values.amax(-1) if values.numel() else values.sum(-1)
            return _Units(counted, masked(lowest, counted), highest, None)
        length = selected.sum(-1)
        of_ratio = self.config.measure == "ratio"
        total = (trainer - engine if of_ratio else masked(self._of_tokens(trainer, engine), selected)).sum(-1)
        if level == "geometric":
            total = total / length.clamp(min=1)
        weights = masked(_exp(total) if of_ratio else total, length > 0)
        return _Units(length > 0, weights, weights, None)

    def _of_tokens(self, trainer: Tensor, engine: Tensor) -> Tensor:
        if self.config.measure in ("k2", "k3"):
            # As in the weights, a log ratio beyond the limit carries no information.
            gap = (trainer - engine).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
            return gap.square() / 2 if self.config.measure == "k2" else torch.expm1(gap) - gap
        if self.config.measure != "bernoulli_kl":
            return _exp(trainer - engine)
        trainer, engine = trainer.clamp(max=LARGEST_LOGP), engine.clamp(max=LARGEST_LOGP)
        # log(1 - exp(x)), exact for small and large x.
        others, other_engine = (torch.log(-torch.expm1(logp)) for logp in (trainer, engine))
        gap, other_gap = trainer - engine, others - other_engine
        forward = trainer.exp() * gap + others.exp() * other_gap
        backward = -engine.exp() * gap - other_engine.exp() * other_gap
        return torch.maximum(forward, backward)

    def _bounded(self, units: _Units, within: Tensor | None) -> tuple[Tensor, Tensor]:
        low, high = self.config.bounds
        if within is None:
            within = (units.lowest >= low) & (units.highest <= high)
        outside = units.counted & ~within
        if units.negative is not None:
            outside = outside & units.negative
        if self.config.kind == "truncate":
            return masked(units.highest.clamp(low, high), units.counted), outside
        kept = units.highest if self.config.kind == "mask" else units.counted.double()
        return kept.masked_fill(outside, 0.0), outside

    def _metrics(
        self, units: _Units, applied: Tensor, outside: Tensor, estimates: Sequence[Tensor]
    ) -> dict[str, Metric]:
        weights, counted = units.highest, units.counted
        largest = weights.amax() if weights.numel() else weights.sum()
        sums = [weights.sum(), applied.sum(), applied.square().sum(), largest]
        counts = [outside.count_nonzero().double(), counted.count_nonzero().double()]
        # One device-to-host transfer instead of one per number.
        numbers = torch.stack([*sums, *counts, *estimates]).tolist()
        (total, kept, squares, greatest, beyond, count), (*divergences, num_kept) = numbers[:6], numbers[6:]
        share = "truncated_fraction" if self.config.kind == "truncate" else "masked_fraction"
        return {
            "weight_mean": Mean(total, count),
            "weight_max": Max(greatest),
            "effective_sample_fraction": EffectiveFraction(kept, squares, count),
            share: Mean(beyond, count),
            **{name: Mean(value, num_kept) for name, value in zip(DIVERGENCES, divergences, strict=True)},
        }


def corrected(loss: PolicyLoss, corrections: Sequence[Correction], inputs: PolicyLossInputs) -> PolicyLossResult:
    """Compute a loss and multiply it by the factors of the corrections whose `apply` is set.

    Metrics: `correction/` and each name of CorrectionResult. With several corrections their position stands before the
    name, and correction/effective_sample_fraction and correction/masked_fraction describe the product of the factors
    that are applied, per trained token.
    Shapes: inputs as the loss and the corrections need them.
    """
    result = loss(inputs)
    if not corrections:
        return result
    assert inputs.rollout_logp is not None
    given = {name: getattr(inputs, name) for name in ("rollout_logp", "mask", "old_logp", "logp", "advantages")}
    # One correction at most depends on the whole update.
    given["within"] = inputs.within
    factors, metrics = torch.ones_like(inputs.logp), dict(result.metrics)
    for number, correction in enumerate(corrections):
        found = correction(**(given if correction.chooses_tokens else given | {"within": None}))
        prefix = f"correction/{number}_" if len(corrections) > 1 else "correction/"
        metrics |= {f"{prefix}{name}": metric for name, metric in found.metrics.items()}
        if correction.config.apply:
            factors = factors * found.weights
    if len(corrections) > 1:
        metrics |= _metrics_of_product(factors, inputs.mask > 0)
    return PolicyLossResult(result.loss * factors, metrics)


def _metrics_of_product(factors: Tensor, selected: Tensor) -> dict[str, Metric]:
    kept = masked(factors, selected).double()
    dropped = (selected & (kept == 0)).count_nonzero().double()
    numbers = [kept.sum(), kept.square().sum(), dropped, selected.count_nonzero().double()]
    total, squares, beyond, count = torch.stack(numbers).tolist()
    return {
        "correction/effective_sample_fraction": EffectiveFraction(total, squares, count),
        "correction/masked_fraction": Mean(beyond, count),
    }


def _exp(difference: Tensor) -> Tensor:
    # Clamp before exp: an infinite weight would make the metrics infinite even if it is masked afterwards.
    return difference.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
