"""Group policy gradient (GPG): centered rewards, scaled to compensate for groups without gradient.

    A_i = alpha (r_i - mean(r_G)),    alpha = B / (B - M)

B: responses of the batch; M: responses in groups of equal rewards. M terms of the batch mean are 0; alpha turns it into
the mean over the other responses. The paper's F_norm is 1.

Source: GPG, arXiv 2504.02546, the objective with its accurate gradient estimation (AGE).
Shapes: token_rewards, mask [B, T], group_ids [B] -> [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mcore_rl.algorithms.advantages.per_response import PerResponse
from mcore_rl.algorithms.interface import AdvantageInputs


@dataclass(frozen=True)
class GPG(PerResponse):
    """Group policy gradient. alpha is 1 if all groups have unequal rewards, for example after dynamic sampling."""

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        groups = inputs.groups()
        # Compare rewards exactly, so that alpha counts the same groups whose centered rewards are exactly 0.
        with_signal = groups.sizes[groups.max(rewards) > groups.min(rewards)].sum()
        return groups.centred(rewards) * (len(rewards) / with_signal.clamp(min=1).double())
