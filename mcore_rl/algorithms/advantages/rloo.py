"""REINFORCE leave-one-out (RLOO): the baseline of a response is the mean reward of the other responses in its group.

    A_i = r_i - 1/(k-1) sum_{j in G, j != i} r_j  =  k/(k-1) (r_i - mean(r_G))        for a group G of k responses

A group of one response has advantage 0.

Source: Back to Basics, arXiv 2402.14740, the RLOO estimator, after Kool et al. 2019.
Shapes: token_rewards, mask [B, T], group_ids [B] -> [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mcore_rl.algorithms.advantages.per_response import PerResponse
from mcore_rl.algorithms.interface import AdvantageInputs


@dataclass(frozen=True)
class RLOO(PerResponse):
    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        groups = inputs.groups()
        # A group of one response has centered reward 0, so any finite factor gives 0.
        return groups.centred(rewards) * groups.expand(groups.sizes / (groups.sizes - 1).clamp(min=1).double())
