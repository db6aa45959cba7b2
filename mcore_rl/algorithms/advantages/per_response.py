"""What estimators share whose advantage is one number per response, the same for each of its trained tokens.

The driver calls them with [B, 1] columns: a response's reward as its only token reward, mask 1, and its number of
trained tokens as `lengths`; so no tokens travel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import AdvantageInputs, AdvantageResult, Needs, trained


class PerResponse(ABC):
    """Subclasses are frozen dataclasses and say in `of_rewards` what a response's advantage is."""

    needs: ClassVar[Needs] = Needs(group_ids=True)
    per_response: ClassVar[bool] = True
    whitened: ClassVar[bool] = False

    @abstractmethod
    def of_rewards(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        """Shapes: rewards, result [B], float64."""

    @torch.no_grad()
    def raw(self, inputs: AdvantageInputs) -> AdvantageResult:
        # Not masked: a reward may sit on a token that is not trained, such as the last one of a tool's output.
        rewards = inputs.token_rewards.sum(-1, dtype=torch.float64)
        column = self.of_rewards(rewards, inputs).to(inputs.token_rewards.dtype)[:, None]
        advantages = trained(column, inputs.mask > 0)
        return AdvantageResult(advantages, self.returns(rewards, advantages, inputs))

    def __call__(self, inputs: AdvantageInputs) -> AdvantageResult:
        return self.raw(inputs)

    def returns(self, rewards: Tensor, advantages: Tensor, inputs: AdvantageInputs) -> Tensor:
        """No critic is trained with them; by the field's custom they are the advantages."""
        return advantages
