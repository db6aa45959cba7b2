"""Group-relative advantages for pass@k: only the best response of a group is reinforced.

    A_i = (r_i - max over the others of G) / (std(r_G) + eps)   for the unique best response i of group G, else 0

The difference is the contribution of response i to the objective max_i r_i. If two responses share the best reward, or
if the group has one response, all advantages of the group are 0. std: sample standard deviation (n - 1);
normalize_by_std=False skips the division.

Source: Optimizing Language Models for Inference Time Objectives, arXiv 2503.19595, the leave-one-out estimator of
pass@k; the division is GRPO's (arXiv 2402.03300).
Shapes: token_rewards, mask [B, T], group_ids [B] -> [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.grpo import STD_EPS
from mcore_rl.algorithms.advantages.per_response import PerResponse
from mcore_rl.algorithms.interface import AdvantageInputs


@dataclass(frozen=True)
class GRPOPassK(PerResponse):
    """Pass@k advantages; k is the size of the group, which may differ between groups."""

    normalize_by_std: bool = True

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        groups = inputs.groups()
        best = groups.max(rewards)
        is_best = rewards == groups.expand(best)
        # With a unique best response, the maximum of the others is the maximum without it.
        others = groups.max(torch.where(is_best, -torch.inf, rewards))
        # In a group of one response, the maximum of no others is -inf; the condition on the size excludes it.
        unique_best = (groups.sum(is_best.double()) == 1) & (groups.sizes > 1)
        gain = torch.where(unique_best, best - others, 0.0)
        if self.normalize_by_std:
            gain = gain / (groups.centred_and_std(rewards)[1] + STD_EPS)
        return torch.where(is_best, groups.expand(gain), 0.0)
