"""Estimator that compares the parts of the rewards, such as correctness and format, separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.per_response import STD_EPS, PerResponse, sample_std
from mcore_rl.algorithms.interface import AdvantageInputs, Needs
from mcore_rl.algorithms.segments import Segments
from mcore_rl.errors import ConfigError

KEY = "algorithm.part_weights"


@dataclass(frozen=True)
class GDPO(PerResponse):
    """GDPO: normalizes every part of the reward in its group, then the weighted sum of the parts over the batch.

        A_ni = (r_ni - mean(r_nG)) / (std(r_nG) + eps)      part n of response i of group G
        S_i  = sum_n w_n A_ni
        A_i  = S_i / (std(S) + eps)                         over all responses of the batch

    w_n: part_weights, by the name of the part. A part is a number that graders return besides the score, the score
    of an entry of reward.weighted, or the score of a reward model. The total reward is not used. The paper also
    subtracts the mean of S over the batch, which is 0, since every part is centered in its group. A response without
    part n (its grading failed) has A_ni = 0 and does not count in the mean and std of its group. std: sample standard
    deviation (n - 1). Advantages are exactly 0 for a group whose responses are equal in all parts.

    Source: GDPO, arXiv 2601.05242, equations 4, 6 and 7. Mean and std of S count every response once, as in equation 6
    and in the authors' code for TRL; their code for verl weighs responses by their number of tokens.
    Shapes: token_rewards, mask [B, T], group_ids [B], parts [B] each -> [B, T].
    Raises: ConfigError without weights, or for a part that no response has.
    """

    needs: ClassVar[Needs] = Needs(group_ids=True, parts=True)

    part_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.part_weights:
            raise ConfigError(f"algorithm.advantage=gdpo needs {KEY}, the weight of every part of the reward by name")

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        assert inputs.parts is not None
        total, groups = torch.zeros_like(rewards), inputs.groups()
        for name, weight in self.part_weights.items():
            part = inputs.parts.get(name)
            if len(rewards) and (part is None or part.isnan().all()):
                known = ", ".join(sorted(inputs.parts)) or "none"
                raise ConfigError(f"{KEY}.{name}: no response of this step has this part; the parts are: {known}")
            if part is not None:
                total += weight * _normalized(part.double(), groups, inputs)
        return total / (sample_std(total) + STD_EPS)


def _normalized(part: Tensor, groups: Segments, inputs: AdvantageInputs) -> Tensor:
    """Normalize a part in each group; 0 where it is NaN. Shapes: [B], float64."""
    given = ~part.isnan()
    if given.all():
        centred, std = groups.centred_and_std(part)
        return centred / (groups.expand(std) + STD_EPS)
    assert inputs.group_ids is not None
    of_given = Segments.of(inputs.group_ids[given])
    centred, std = of_given.centred_and_std(part[given])
    result = torch.zeros_like(part)
    result[given] = centred / (of_given.expand(std) + STD_EPS)
    return result
