"""Group-relative advantages (GRPO).

    A_i = (r_i - mean(r_G)) / (std(r_G) + eps)     for response i of group G, the same for each of its tokens

r_i: sum of the token rewards of response i; std: sample standard deviation (n - 1).
normalize_by_std=False skips the division (Dr. GRPO).

Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783, section 3.2.
Shapes: token_rewards, mask [B, T], group_ids [B] -> [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mcore_rl.algorithms.advantages.per_response import PerResponse
from mcore_rl.algorithms.interface import AdvantageInputs

# Keeps the division finite for equal rewards, whose centered value is 0.
STD_EPS = 1e-6


@dataclass(frozen=True)
class GRPO(PerResponse):
    """Group-relative advantages; exactly 0 for a group of equal rewards or of one response."""

    normalize_by_std: bool = True

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        groups = inputs.groups()
        centred, std = groups.centred_and_std(rewards)
        return centred / groups.expand(std + STD_EPS) if self.normalize_by_std else centred
