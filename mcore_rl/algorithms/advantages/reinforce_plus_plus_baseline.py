"""REINFORCE++ with a baseline: rewards centered per group, then whitened over all trained tokens of the batch.

    A_i = whiten(r_i - mean(r_G))       mean and standard deviation over all trained tokens of the batch

Dividing by the standard deviation of the batch instead of the group avoids the bias towards prompts whose rewards vary
little. Long responses have more tokens, so the mean over tokens is not 0: a group of equal rewards has advantage 0
before whitening (`raw`) but not after it.

Source: REINFORCE++, arXiv 2501.03262, the variant with baseline: group mean, then global normalisation.
Shapes: token_rewards, mask [B, T], group_ids [B], lengths [B] (None: counted from the mask) -> [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mcore_rl.algorithms.advantages.per_response import PerResponse
from mcore_rl.algorithms.interface import AdvantageInputs


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(PerResponse):
    """REINFORCE++ with a group baseline; returns are the centered rewards."""

    whitened: ClassVar[bool] = True

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        return inputs.groups().centred(rewards)
