"""Base class of estimators that compute one advantage per response, the same for each of its trained tokens.

The driver calls them with [B, 1] columns: the response's reward as its only token reward, mask 1, and its number of
trained tokens in `lengths`. The driver therefore needs no tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import AdvantageInputs, AdvantageResult, Needs, masked


class PerResponse(ABC):
    """Base class: subclasses are frozen dataclasses that implement `response_advantages`."""

    needs: ClassVar[Needs] = Needs(group_ids=True)
    per_response: ClassVar[bool] = True
    whitened: ClassVar[bool] = False

    @abstractmethod
    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        """Compute the advantage of each response. Shapes: rewards, result [B], float64."""

    @torch.no_grad()
    def raw(self, inputs: AdvantageInputs) -> AdvantageResult:
        # Do not apply the mask: the reward may be on a token that is not trained, such as the end of a tool's output.
        rewards = inputs.token_rewards.sum(-1, dtype=torch.float64)
        column = self.response_advantages(rewards, inputs).to(inputs.token_rewards.dtype)[:, None]
        advantages = masked(column, inputs.mask > 0)
        return AdvantageResult(advantages, self.returns(rewards, advantages, inputs))

    def returns(self, rewards: Tensor, advantages: Tensor, inputs: AdvantageInputs) -> Tensor:
        """Returns equal the advantages by convention; no critic is trained on them."""
        return advantages
