"""ReMax: the baseline of a response is the reward of the greedy response to the same prompt.

    A_i = r_i - r(greedy response)      the same for each token of response i; returns are r_i

Source: ReMax, arXiv 2310.10505, the gradient estimator with b(x), the greedy reward.
Shapes: token_rewards, mask [B, T], baseline_rewards [B] (reward of the greedy response to the same prompt) -> [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mcore_rl.algorithms.advantages.per_response import PerResponse
from mcore_rl.algorithms.interface import AdvantageInputs, Needs, masked


@dataclass(frozen=True)
class ReMax(PerResponse):
    needs: ClassVar[Needs] = Needs(baseline_rewards=True)

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        assert inputs.baseline_rewards is not None
        return rewards - inputs.baseline_rewards.double()

    def returns(self, rewards: Tensor, advantages: Tensor, inputs: AdvantageInputs) -> Tensor:
        return masked(rewards.to(advantages.dtype)[:, None], inputs.mask > 0)
