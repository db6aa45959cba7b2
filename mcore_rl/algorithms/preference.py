"""Losses, rewards and weights of pairs of responses, from the sums of their log-probabilities (losses/preference.py has
the formulas)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mcore_rl.config.objectives import PreferenceConfig
from mcore_rl.types import Mean, Metric

CHOSEN, REJECTED = 0, 1
"""Columns of the responses of a pair."""


@dataclass(frozen=True)
class ScoredPairs:
    """Results for P pairs, without gradient.

    loss: DPO's loss. rewards: of both responses. weights: minus the derivative of the loss with respect to each
    response's token log-probabilities.

    Shapes: loss float64 [P]; rewards, weights float64 [P, 2], columns CHOSEN and REJECTED. Units: loss, rewards in
    nats.
    """

    loss: Tensor
    rewards: Tensor
    weights: Tensor


def score_pairs(logp: Tensor, ref_logp: Tensor | None, tokens: Tensor, section: PreferenceConfig) -> ScoredPairs:
    """Compute loss, rewards and weights of pairs.

    logp, ref_logp: sums over a response's trained tokens; ref_logp is None with preference.reference_free. tokens:
    numbers of trained tokens.

    Shapes: all [P, 2], columns CHOSEN and REJECTED. Units: nats.
    """
    relative = logp.double() if ref_logp is None else logp.double() - ref_logp.double()
    scale = section.beta / (tokens.double() if section.length_normalized else torch.ones_like(relative))
    rewards, e = scale * relative, section.label_smoothing
    h = rewards[:, CHOSEN] - rewards[:, REJECTED] - section.target_margin
    loss = -(1 - e) * logsigmoid(h) - e * logsigmoid(-h)
    slope = (1 - e) * torch.sigmoid(-h) - e * torch.sigmoid(h)  # minus the derivative with respect to h
    return ScoredPairs(loss, rewards, torch.stack([slope, -slope], 1) * scale)


def describe_pairs(pairs: ScoredPairs, logp: Tensor, prefix: str) -> dict[str, Metric]:
    """Return the metrics of pairs; their names start with `prefix`.

    accuracy: fraction of pairs whose chosen response has the larger reward; equal rewards count one half, so a policy
    that equals its reference has 0.5. margin: difference of the rewards. chosen_logp, rejected_logp: sum over the
    tokens of a response.
    """
    margins = pairs.rewards[:, CHOSEN] - pairs.rewards[:, REJECTED]
    values = {
        "accuracy": (margins > 0).double() + 0.5 * (margins == 0).double(),
        "margin": margins,
        "chosen_reward": pairs.rewards[:, CHOSEN],
        "rejected_reward": pairs.rewards[:, REJECTED],
        "chosen_logp": logp[:, CHOSEN].double(),
        "rejected_logp": logp[:, REJECTED].double(),
    }
    return {f"{prefix}{name}": Mean(float(each.sum()), len(each)) for name, each in values.items()}
