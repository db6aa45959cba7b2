"""Losses that classify the responses of a group as correct or wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import Needs, PolicyLossInputs, PolicyLossResult, masked
from mcore_rl.algorithms.losses.sequences import row_means
from mcore_rl.algorithms.losses.surrogate import check_positive, ratio_inputs, ratio_metrics
from mcore_rl.algorithms.segments import Segments


@dataclass(frozen=True)
class REAL:
    """REAL (rewards as labels): cross-entropy of a classifier of the responses of a group, correct against wrong.

        s_i  = mean_t (logp_it - old_logp_it)                  over the trained tokens of response i: its score,
                                                               the log of its ratio to the old policy
        L_G  = log(1 + sum_{i in G, A_i > 0} exp(-s_i / tau)) + log(1 + sum_{i in G, A_i < 0} exp(s_i / tau))
               0 for a group without responses of both labels
        L_it = L_G,  with the gradient  k_G (dL_G / ds_i) grad logp_it         k_G: responses of group G

    The label of a response is the sign of its advantages, summed over its tokens: with rewards of 0 and 1 and a
    baseline between them it is the reward. Other rewards are labelled by the side of the baseline on which they are;
    advantages of 0 have no label. The size of an advantage has no effect. The gradient of a score is at most 1 / tau.

    Use seq-mean-token-mean: with groups of equal size, the mean over responses of the mean over their tokens is the
    mean of L_G over the groups, in value and gradient. dL_G / ds_i depends on the scores of all responses of the group
    under the current policy, wherever they are computed; responses that are not trained do not count. Before the first
    update of a batch, the scores are 0 and need no pass, unless algorithm.old_logp=rollout.

    tau: temperature, nats per token.

    Metrics: ratio_metrics without clip fractions; gradient_weight, the mean of |k_G dL_G / ds_i| over tokens.

    Source: arXiv 2602.05630, the loss with anchor logits of 0 and its gradient magnitude. Only the abstract and
    summaries of the text were available; formula, groups of one label and tau follow the authors' code
    (Red-RL/REAL, loss_type=real). It takes rewards of exactly 1 and 0 as labels, and computes groups within a
    micro-batch.
    Shapes: [B, T], one whole response per row; any one shape if group_loss and slope are given.
    """

    needs: ClassVar[Needs] = Needs(advantages=True, old_logp=True, whole_group=True)

    tau: float = 0.5

    def __post_init__(self) -> None:
        check_positive(tau=self.tau)

    def group_terms(self, scores: Tensor, signs: Tensor, group_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return L_G and k_G dL_G / ds_i for each response.

        signs: labels, above 0, below 0, or 0. group_ids: None: one group.
        Shapes: scores, signs float64 [B]; group_ids int64 [B] -> float64 [B] each.
        """
        groups = Segments.of(torch.zeros_like(signs, dtype=torch.int64) if group_ids is None else group_ids)
        loss, slope, labels = torch.zeros_like(scores), torch.zeros_like(scores), []
        for label in (1.0, -1.0):
            chosen = signs * label > 0
            exponent = (-label * scores / self.tau).masked_fill(~chosen, -torch.inf)
            # The largest term, at least the anchor's of exp(0), is taken out of the sum.
            shift = groups.max(exponent).clamp(min=0)
            total = (-shift).exp() + groups.sum((exponent - groups.expand(shift)).exp())
            loss = loss + groups.expand(shift + total.log())
            slope = slope - label * (exponent - groups.expand(shift)).exp() / groups.expand(total) / self.tau
            labels.append(groups.max(chosen.double()) > 0)
        both = groups.expand(labels[0] & labels[1])
        return masked(loss, both), masked(slope * groups.expand(groups.sizes), both)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossResult:
        selected, log_ratio, advantages = ratio_inputs(inputs)
        log_ratio = log_ratio.detach()
        group_loss, slope = inputs.group_loss, inputs.slope
        if group_loss is None or slope is None:
            group_loss, slope = self._of_rows(log_ratio, advantages, selected, inputs.group_ids)
        value, slope = masked(group_loss, selected), masked(slope, selected)
        logp = masked(inputs.logp, selected)
        loss = value + slope * (logp - logp.detach())
        return PolicyLossResult(
            loss, ratio_metrics(log_ratio, selected, low=None, high=None, gradient_weight=slope.abs())
        )

    def _of_rows(
        self, log_ratio: Tensor, advantages: Tensor, selected: Tensor, group_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the terms from the responses of this call; returns them per token, [B, T]."""
        if log_ratio.dim() != 2:
            raise ValueError(f"real takes one response per row, [B, T], not {list(log_ratio.shape)}")
        scores, signs = row_means(log_ratio, selected), advantages.sum(-1, dtype=torch.float64)
        counted = selected.any(-1)
        terms = torch.zeros(2, len(scores), dtype=torch.float64, device=scores.device)
        groups = None if group_ids is None else group_ids[counted]
        terms[:, counted] = torch.stack(self.group_terms(scores[counted], signs[counted], groups))
        loss, slope = terms.to(log_ratio.dtype)[:, :, None].expand(2, *log_ratio.shape)
        return loss, slope
