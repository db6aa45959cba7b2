"""Estimators that compute one advantage per response, the same for each of its trained tokens.

The driver calls them with [B, 1] columns: the response's reward as its only token reward, mask 1, and its number of
trained tokens in `lengths`. The driver therefore needs no tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import MAX_NAMED, AdvantageInputs, AdvantageResult, Needs, masked
from mcore_rl.algorithms.segments import Segments
from mcore_rl.config.algorithm import STD_LEVELS
from mcore_rl.errors import ConfigError, DataError


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


# Keeps the division finite for equal rewards, whose centered value is 0.
STD_EPS = 1e-6


def sample_std(values: Tensor) -> Tensor:
    """Compute the sample standard deviation (n - 1) of `values` [B]; 0 for fewer than two values."""
    return values.std() if len(values) > 1 else values.new_zeros(())


@dataclass(frozen=True)
class GRPO(PerResponse):
    """Group-relative advantages (GRPO).

        A_i = (r_i - b_i) / (std + eps)     for response i of group G, the same for each of its tokens

        b_i, the baseline:   mean(r_G)
            leave_one_out    the mean of the other responses of G
        std, by std_level:
            group            std(r_G)
            batch            std of r_j - b_j over all responses j of the step (ScaleRL)
            batch_rewards    std of r_j over all responses j of the step (Lite PPO)

    r_i: sum of the token rewards of response i; std: sample standard deviation (n - 1). normalize_by_std=False skips
    the division (Dr. GRPO). Advantages are exactly 0 for a group of equal rewards or of one response.
    leave_one_out without the division is rloo.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783, section 3.2; ScaleRL, arXiv
    2510.13786, section 4; Lite PPO, arXiv 2508.08221; leave-one-out: arXiv 2402.14740.
    Shapes: token_rewards, mask [B, T], group_ids [B] -> [B, T].
    """

    normalize_by_std: bool = True
    std_level: str = "group"
    leave_one_out: bool = False

    def __post_init__(self) -> None:
        if self.std_level not in STD_LEVELS:
            raise ConfigError(f"algorithm.std_level={self.std_level} must be one of {', '.join(STD_LEVELS)}")

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        groups = inputs.groups()
        centred, std = groups.centred_and_std(rewards)
        if self.leave_one_out:
            centred = _without_own(centred, groups)
        if not self.normalize_by_std:
            return centred
        if self.std_level == "group":
            return centred / groups.expand(std + STD_EPS)
        return centred / (sample_std(centred if self.std_level == "batch" else rewards) + STD_EPS)


def _without_own(centred: Tensor, groups: Segments) -> Tensor:
    """Convert distances from the mean of the group to distances from the mean of the group's other responses.

    Shapes: [B].
    """
    # r - mean of the others = k / (k - 1) (r - mean). A group of one has distance 0, so any finite factor gives 0.
    return centred * groups.expand(groups.sizes / (groups.sizes - 1).clamp(min=1).double())


@dataclass(frozen=True)
class GRPOPassK(PerResponse):
    """Group-relative advantages for pass@k: only the best response of a group is reinforced.

        A_i = (r_i - max over the others of G) / (std(r_G) + eps)   for the unique best response i of group G, else 0

    The difference is the contribution of response i to the objective max_i r_i. If two responses share the best reward,
    or if the group has one response, all advantages of the group are 0. k is the size of the group, which may differ
    between groups. std: sample standard deviation (n - 1); normalize_by_std=False skips the division.

    Source: Optimizing Language Models for Inference Time Objectives, arXiv 2503.19595, the leave-one-out estimator of
    pass@k; the division is GRPO's (arXiv 2402.03300).
    Shapes: token_rewards, mask [B, T], group_ids [B] -> [B, T].
    """

    normalize_by_std: bool = True

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        groups = inputs.groups()
        best = groups.max(rewards)
        is_best = rewards == groups.expand(best)
        # With a unique best response, the maximum of the others is the maximum without it.
        others = groups.max(torch.where(is_best, -torch.inf, rewards))
        # In a group of one response, the maximum of no others is -inf; the condition on the size excludes it.
        unique_best = (groups.sum(is_best.double()) == 1) & (groups.sizes > 1)
        gain = torch.where(unique_best, best - others, 0.0)
        if self.normalize_by_std:
            gain = gain / (groups.centred_and_std(rewards)[1] + STD_EPS)
        return torch.where(is_best, groups.expand(gain), 0.0)


@dataclass(frozen=True)
class RLOO(PerResponse):
    """REINFORCE leave-one-out (RLOO): the baseline is the mean reward of the other responses in the group.

        A_i = r_i - 1/(k-1) sum_{j in G, j != i} r_j  =  k/(k-1) (r_i - mean(r_G))        for a group G of k responses

    A group of one response has advantage 0.

    Source: Back to Basics, arXiv 2402.14740, the RLOO estimator, after Kool et al. 2019.
    Shapes: token_rewards, mask [B, T], group_ids [B] -> [B, T].
    """

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        groups = inputs.groups()
        return _without_own(groups.centred(rewards), groups)


@dataclass(frozen=True)
class MaxRL(PerResponse):
    """MaxRL: the policy gradient of the log-likelihood of a correct response, a series truncated at k - 1 terms.

        A_i = (r_i - mean(r_G)) / mean(r_G)     0 if all rewards of group G are 0

    For rewards of 0 and 1, mean(r_G) is the pass rate of the group, so hard prompts get large advantages: with K
    correct responses out of k, a correct one has (k - K) / K and a wrong one -1. The expected gradient belongs to the
    first k - 1 terms of log(p) as a series in 1 - p, for the probability p of a correct response. Groups of equal
    rewards have advantage exactly 0. Other rewards of at least 0 are weighted in the same way; the derivation is for 0
    and 1.

    Source: Maximum Likelihood Reinforcement Learning, arXiv 2602.02710, algorithm 1; the authors' code adds 1e-6 to
    the denominator.
    Shapes: token_rewards, mask [B, T], group_ids [B] -> [B, T].
    Raises: DataError naming responses with negative rewards.
    """

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        negative = (rewards < 0).nonzero()[:, 0].tolist()
        if negative:
            raise DataError(
                f"algorithm.advantage=maxrl needs rewards of at least 0, but {len(negative)} responses have negative "
                f"ones: {negative[:MAX_NAMED]}; change reward.function, or choose another estimator"
            )
        groups = inputs.groups()
        means = groups.sum(rewards) / groups.sizes
        return groups.centred(rewards) / groups.expand(torch.where(means > 0, means, 1.0))


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(PerResponse):
    """REINFORCE++ with a baseline: rewards centered per group, then whitened over all trained tokens of the batch.

        A_i = whiten(r_i - mean(r_G))       mean and standard deviation over all trained tokens of the batch

    Dividing by the standard deviation of the batch instead of the group avoids the bias towards prompts whose rewards
    vary little. Long responses have more tokens, so the mean over tokens is not 0: a group of equal rewards has
    advantage 0 before whitening (`raw`) but not after it. Returns are the centered rewards.

    Source: REINFORCE++, arXiv 2501.03262, the variant with baseline: group mean, then global normalisation.
    Shapes: token_rewards, mask [B, T], group_ids [B], lengths [B] (None: counted from the mask) -> [B, T].
    """

    whitened: ClassVar[bool] = True

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        return inputs.groups().centred(rewards)


@dataclass(frozen=True)
class ReMax(PerResponse):
    """ReMax: the baseline of a response is the reward of the greedy response to the same prompt.

        A_i = r_i - r(greedy response)      the same for each token of response i; returns are r_i

    Source: ReMax, arXiv 2310.10505, the gradient estimator with b(x), the greedy reward.
    Shapes: token_rewards, mask [B, T], baseline_rewards [B] (rewards of the greedy responses) -> [B, T].
    """

    needs: ClassVar[Needs] = Needs(baseline_rewards=True)

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        assert inputs.baseline_rewards is not None
        return rewards - inputs.baseline_rewards.double()

    def returns(self, rewards: Tensor, advantages: Tensor, inputs: AdvantageInputs) -> Tensor:
        return masked(rewards.to(advantages.dtype)[:, None], inputs.mask > 0)


@dataclass(frozen=True)
class OPO(PerResponse):
    """OPO: the optimal reward baseline, which minimizes the variance of the gradient.

        A_i = r_i - b_G,    b_G = sum_{j in G} l_j r_j / sum_{j in G} l_j            l_j: trained tokens of response j

    The optimal baseline weights each reward by the squared norm of the response's score function. The simplified form
    assumes that this norm is proportional to the length of the response. A response without trained tokens has no
    weight in the baseline of its group.

    Source: On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585, the simplified b*(x).
    Shapes: token_rewards, mask [B, T], group_ids [B], lengths [B] (None: mask's) -> [B, T].
    """

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        groups = inputs.groups()
        lengths = inputs.trained_tokens()
        above, total = groups.above_minimum(rewards), groups.sum(lengths)
        # A group without trained tokens has no baseline and needs none; avoid 0 / 0.
        baseline = torch.where(total > 0, groups.sum(lengths * above) / total, 0.0)
        return above - groups.expand(baseline)


@dataclass(frozen=True)
class GPG(PerResponse):
    """Group policy gradient (GPG): centered rewards, scaled to compensate for groups without gradient.

        A_i = alpha (r_i - mean(r_G)),    alpha = B / (B - M)

    B: responses of the batch; M: responses in groups of equal rewards. M terms of the batch mean are 0; alpha turns it
    into the mean over the other responses, and is 1 if all groups have unequal rewards, for example after dynamic
    sampling. The paper's F_norm is 1.

    Source: GPG, arXiv 2504.02546, the objective with its accurate gradient estimation (AGE).
    Shapes: token_rewards, mask [B, T], group_ids [B] -> [B, T].
    """

    def response_advantages(self, rewards: Tensor, inputs: AdvantageInputs) -> Tensor:
        groups = inputs.groups()
        # Compare rewards exactly, so that alpha counts the same groups whose centered rewards are exactly 0.
        with_signal = groups.sizes[groups.max(rewards) > groups.min(rewards)].sum()
        return groups.centred(rewards) * (len(rewards) / with_signal.clamp(min=1).double())
