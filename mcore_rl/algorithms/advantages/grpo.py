"""Group-relative advantages.

    A_i = (r_i - mean(r_G)) / (std(r_G) + eps)     for response i of group G, the same for each of its tokens

r_i is the sum of the response's token rewards, std the sample standard deviation (n - 1).
normalize_by_std=False leaves the centred reward (Dr. GRPO).

Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783, section 3.2.
Shapes: token_rewards, mask [B, T], group_ids [B] -> [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import AdvantageInputs, AdvantageResult, Needs
from mcore_rl.algorithms.segments import Segments

STD_EPS = 1e-6


@dataclass(frozen=True)
class GRPO:
    """A group of equal rewards, and so a group of one response, has advantage exactly 0."""

    needs: ClassVar[Needs] = Needs(group_ids=True)
    per_response: ClassVar[bool] = True

    normalize_by_std: bool = True

    @torch.no_grad()
    def __call__(self, inputs: AdvantageInputs) -> AdvantageResult:
        assert inputs.group_ids is not None
        # Not masked: a reward may sit on a token that is not trained, such as the last one of a tool's output.
        rewards = inputs.token_rewards.double().sum(-1)
        relative = self._relative(rewards, Segments.of(inputs.group_ids))
        selected = inputs.mask > 0
        advantages = torch.where(selected, relative.to(inputs.token_rewards.dtype)[:, None], 0.0)
        return AdvantageResult(advantages, advantages)

    def _relative(self, rewards: Tensor, groups: Segments) -> Tensor:
        # Measured from the group's least reward, equal rewards are 0 before any rounding, so their mean is 0 too.
        above = rewards - groups.spread(groups.min(rewards))
        centred = above - groups.spread(groups.sum(above) / groups.sizes)
        if not self.normalize_by_std:
            return centred
        degrees = (groups.sizes - 1).clamp(min=1)
        std = (groups.sum(centred.square()) / degrees).sqrt()
        return centred / groups.spread(std + STD_EPS)
