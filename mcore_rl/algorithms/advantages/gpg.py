"""Group policy gradient: centred rewards, made up for the groups that give no gradient.

    A_i = alpha (r_i - mean(r_G)),    alpha = B / (B - M)

B counts the batch's responses and M those of groups with equal rewards. The mean over the batch has M zeros in it;
alpha makes it the mean over the others. The paper's F_norm is 1.

Source: GPG, arXiv 2504.02546, the objective with its accurate gradient estimation (AGE).
Shapes: token_rewards, mask [B, T], group_ids [B] -> [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mcore_rl.algorithms.advantages.per_response import PerResponse
from mcore_rl.algorithms.interface import AdvantageInputs
from mcore_rl.algorithms.segments import Segments


@dataclass(frozen=True)
class GPG(PerResponse):
    """Where every group has signal, as after dynamic sampling, alpha is 1."""

    def of_rewards(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        assert inputs.group_ids is not None
        groups = Segments.of(inputs.group_ids)
        with_signal = groups.sizes[groups.max(rewards) > groups.min(rewards)].sum()
        return groups.centred(rewards) * (len(rewards) / with_signal.clamp(min=1).double())
