"""OPO: the optimal reward baseline, which minimizes the variance of the gradient.

    A_i = r_i - b_G,    b_G = sum_{j in G} l_j r_j / sum_{j in G} l_j            l_j: trained tokens of response j

The optimal baseline weights each reward by the squared norm of the response's score function. The simplified form
assumes that this norm is proportional to the length of the response.

Source: On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585, the simplified b*(x).
Shapes: token_rewards, mask [B, T], group_ids [B], lengths [B] (None: mask's) -> [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.per_response import PerResponse
from mcore_rl.algorithms.interface import AdvantageInputs


@dataclass(frozen=True)
class OPO(PerResponse):
    """Optimal-baseline advantages. A response without trained tokens has no weight in the baseline of its group."""

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        groups = inputs.groups()
        lengths = inputs.trained_tokens()
        above, total = groups.above_minimum(rewards), groups.sum(lengths)
        # A group without trained tokens has no baseline and needs none; avoid 0 / 0.
        baseline = torch.where(total > 0, groups.sum(lengths * above) / total, 0.0)
        return above - groups.expand(baseline)
