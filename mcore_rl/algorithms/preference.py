"""Losses, rewards and weights of pairs of responses, from the sums of their log-probabilities or from their scores
(losses/preference.py has the formulas)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mcore_rl.config.objectives import HINGE, IPO, ROBUST, PreferenceConfig
from mcore_rl.types import Mean, Metric

CHOSEN, REJECTED = 0, 1
"""Columns of the responses of a pair."""


@dataclass(frozen=True)
class ScoredPairs:
    """Results for P pairs, without gradient.

    loss: the objective's loss. rewards: of both responses. weights: minus the derivative of the loss with respect to
    each response's token log-probabilities, or its score. logp: sums of the policy's log-probabilities; None for
    scores.

    Shapes: loss float64 [P]; rewards, weights, logp float64 [P, 2], columns CHOSEN and REJECTED. Units: loss, rewards,
    logp in nats.
    """

    loss: Tensor
    rewards: Tensor
    weights: Tensor
    logp: Tensor | None = None

    def __getitem__(self, pairs: Tensor) -> ScoredPairs:
        """Select pairs. Shapes: pairs bool [P]."""
        logp = None if self.logp is None else self.logp[pairs]
        return ScoredPairs(self.loss[pairs], self.rewards[pairs], self.weights[pairs], logp)


def score_pairs(logp: Tensor, ref_logp: Tensor | None, tokens: Tensor, section: PreferenceConfig) -> ScoredPairs:
    """Compute loss, rewards and weights of pairs for direct preference optimization.

    logp, ref_logp: sums over a response's trained tokens; ref_logp is None with preference.reference_free. tokens:
    numbers of trained tokens.

    Shapes: all [P, 2], columns CHOSEN and REJECTED. Units: nats.
    """
    logp, tokens = logp.double(), tokens.double()
    relative = logp if ref_logp is None else logp - ref_logp.double()
    scale = section.beta / (tokens if section.length_normalized else torch.ones_like(relative))
    rewards = scale * relative
    loss, slope = _margin_loss(rewards[:, CHOSEN] - rewards[:, REJECTED] - section.target_margin, section)
    weights = torch.stack([slope, -slope], 1) * scale
    if section.sft_weight:
        per_token = section.sft_weight / tokens[:, CHOSEN]
        loss = loss - per_token * logp[:, CHOSEN]
        weights[:, CHOSEN] += per_token
    return ScoredPairs(loss, rewards, weights, logp)


def _margin_loss(h: Tensor, section: PreferenceConfig) -> tuple[Tensor, Tensor]:
    """Return the loss of margins h, and minus its derivative. Shapes: [P] each."""
    beta, e = section.beta, section.label_smoothing
    if section.loss == IPO:
        gap = (h - 0.5) / beta
        return gap**2, -2 * gap / beta
    if section.loss == HINGE:
        return torch.relu(1 - h), (h < 1).double()
    swapped, scale = (-e, 1 - 2 * e) if section.loss == ROBUST else (e, 1.0)
    loss = -(1 - e) * logsigmoid(h) - swapped * logsigmoid(-h)
    return loss / scale, ((1 - e) * torch.sigmoid(-h) - swapped * torch.sigmoid(h)) / scale


def compare_scores(scores: Tensor, margins: Tensor, section: PreferenceConfig) -> ScoredPairs:
    """Compute loss, rewards (the scores) and weights of pairs for a reward model.

    margins: numbers that the loss subtracts from the differences of the scores.

    Shapes: scores [P, 2], columns CHOSEN and REJECTED; margins [P]. Units: nats.
    """
    scores, c = scores.double(), section.center_rewards_coefficient
    h, total = scores[:, CHOSEN] - scores[:, REJECTED] - margins.double(), scores.sum(1)
    slope = torch.sigmoid(-h)
    weights = torch.stack([slope, -slope], 1) - 2 * c * total[:, None]
    return ScoredPairs(-logsigmoid(h) + c * total**2, scores, weights)


def describe_pairs(pairs: ScoredPairs, prefix: str) -> dict[str, Metric]:
    """Return the metrics of pairs; their names start with `prefix`.

    accuracy: fraction of pairs whose chosen response has the larger reward; equal rewards count one half, so a policy
    that equals its reference has 0.5. margin: difference of the rewards. chosen_logp, rejected_logp: sum over the
    tokens of a response; absent for scores.
    """
    margins = pairs.rewards[:, CHOSEN] - pairs.rewards[:, REJECTED]
    values = {
        "accuracy": (margins > 0).double() + 0.5 * (margins == 0).double(),
        "margin": margins,
        "chosen_reward": pairs.rewards[:, CHOSEN],
        "rejected_reward": pairs.rewards[:, REJECTED],
    }
    if pairs.logp is not None:
        values |= {"chosen_logp": pairs.logp[:, CHOSEN], "rejected_logp": pairs.logp[:, REJECTED]}
    return {f"{prefix}{name}": Mean(float(each.sum()), len(each)) for name, each in values.items()}
