"""Advantages over the baseline that makes the gradient's variance least.

    A_i = r_i - b_G,    b_G = sum_{j in G} l_j r_j / sum_{j in G} l_j            l_j: trained tokens of response j

The optimal baseline weighs each reward with the squared norm of the response's score function, which is taken to
grow with the response's length.

Source: On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585, the simplified b*(x).
Shapes: token_rewards, mask [B, T], group_ids [B], lengths [B] (None: mask's) -> [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.per_response import PerResponse
from mcore_rl.algorithms.interface import AdvantageInputs
from mcore_rl.algorithms.segments import Segments


@dataclass(frozen=True)
class OPO(PerResponse):
    """A response without a trained token has no weight in its group's baseline."""

    def of_rewards(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        assert inputs.group_ids is not None
        groups = Segments.of(inputs.group_ids)
        lengths = inputs.trained_tokens()
        above, total = groups.above_least(rewards), groups.sum(lengths)
        # Where no response of a group has a token there is no baseline, and nothing that it would be used for.
        baseline = torch.where(total > 0, groups.sum(lengths * above) / total, 0.0)
        return above - groups.spread(baseline)
