"""Group-relative advantages for the best of k: only the best response of a group is reinforced.

    A_i = (r_i - max over the others of G) / (std(r_G) + eps)   for the one best response i of group G, else 0

Of the objective max_i r_i, it is what a response adds to what the others reach without it. Two responses that share
the best reward add nothing, so their group has advantage 0; so has a group of one, which has nothing to be compared
with. std is the sample standard deviation (n - 1); normalize_by_std=False leaves the difference.

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
from mcore_rl.algorithms.segments import Segments


@dataclass(frozen=True)
class GRPOPassK(PerResponse):
    """k is the size of the group, which may differ from group to group."""

    normalize_by_std: bool = True

    def of_rewards(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        assert inputs.group_ids is not None
        groups = Segments.of(inputs.group_ids)
        best = groups.max(rewards)
        is_best = rewards == groups.spread(best)
        others = groups.max(torch.where(is_best, -torch.inf, rewards))
        alone = (groups.sum(is_best.double()) == 1) & (groups.sizes > 1)
        gain = torch.where(alone, best - others, 0.0)
        if self.normalize_by_std:
            gain = gain / (groups.centred_and_std(rewards)[1] + STD_EPS)
        return torch.where(is_best, groups.spread(gain), 0.0)
