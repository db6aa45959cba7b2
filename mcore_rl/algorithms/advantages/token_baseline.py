"""Estimator with a baseline per token that weights the responses of a group by the norms of their scores.

The responses of a group may be on different ranks: each rank sums over its responses, and the ranks exchange the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import AdvantageInputs, AdvantageResult, Needs, masked

Reduce = Callable[[Tensor, Literal["sum", "min", "max"]], Tensor]
"""Function that reduces a tensor of equal shape elementwise over all ranks; every rank receives the result."""


class GroupTokenEstimator(Protocol):
    """An estimator with needs.score_norms."""

    def over_ranks(self, blocks: Sequence[AdvantageInputs], reduce: Reduce) -> list[AdvantageResult]: ...


@dataclass(frozen=True)
class OptimalTokenBaseline:
    """Optimal token baseline (OTB), which minimizes the variance of the gradient of each token.

        A_it = G_it - B_t,    B_t = sum_{j in G} W_jt G_jt / sum_{j in G} W_jt        over the responses that reach t
        W_it = sum_{s <= t} |d log p(y_is) / d z|^2,    |.|^2 = 1 - 2 p(y_is) + sum_k p_k^2

    G_it: sum of the rewards of response i from token t on; W_it: squared norms of the score with respect to the logits
    z, summed up to token t, which replace the norms of the gradient. t counts trained tokens only; a reward on another
    token is added to the preceding trained token. p is the policy before the updates, at the sampling temperature.
    Advantages are exactly 0 for equal rewards, for a group of one response, and at positions that only one response of
    the group reaches; the authors' code sets B to 0 in the last two cases. Where all W are 0 (tokens of probability 1),
    the baseline is the smallest return. Returns are G.

    Source: The Optimal Token Baseline, arXiv 2602.07078: the optimal baseline and the Logit-Gradient Proxy.
    Shapes: token_rewards, mask, score_norms [B, T], group_ids [B] -> [B, T].
    """

    needs: ClassVar[Needs] = Needs(group_ids=True, score_norms=True)
    per_response: ClassVar[bool] = False
    whitened: ClassVar[bool] = False

    def raw(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Compute the advantages of a whole batch."""
        numbered = replace(inputs, group_ids=inputs.groups().index)
        (result,) = self.over_ranks([numbered], lambda tensor, _: tensor)
        return result

    @torch.no_grad()
    def over_ranks(self, blocks: Sequence[AdvantageInputs], reduce: Reduce) -> list[AdvantageResult]:
        """Compute the advantages of this rank's blocks of responses.

        The numbers of groups start at 0 and are the same on all ranks. A rank needs 24 bytes for each position of the
        longest response of each group of the batch.

        Collective: the ranks that `reduce` covers.
        """
        # Inside the function: numba is slow to import.
        from mcore_rl.algorithms.kernels import discounted_sums

        starts = _first_cells(blocks, reduce)
        cells = [_cells(inputs, starts) for inputs in blocks]
        returns = [discounted_sums(inputs.token_rewards.double(), inputs.mask, 1.0) for inputs in blocks]
        weights = [_cumulative_norms(inputs) for inputs in blocks]
        chosen = [inputs.mask > 0 for inputs in blocks]
        least = torch.full((int(starts[-1]),), torch.inf, dtype=torch.float64)
        for cell, value, on in zip(cells, returns, chosen, strict=True):
            least.scatter_reduce_(0, cell[on], value[on], "amin")
        least = reduce(least, "min")
        sums = torch.zeros(2, len(least), dtype=torch.float64)
        for cell, value, weight, on in zip(cells, returns, weights, chosen, strict=True):
            # Relative to the smallest return, so that equal returns give exactly that baseline.
            sums[0].index_add_(0, cell[on], weight[on] * (value[on] - least[cell[on]]))
            sums[1].index_add_(0, cell[on], weight[on])
        above, total = reduce(sums, "sum")
        baseline = least + torch.where(total > 0, above / total, 0.0)
        results = []
        for inputs, cell, value, on in zip(blocks, cells, returns, chosen, strict=True):
            advantages = torch.zeros_like(value)
            advantages[on] = value[on] - baseline[cell[on]]
            like = inputs.token_rewards
            results.append(AdvantageResult(advantages.to(like), masked(value, on).to(like)))
        return results


def _first_cells(blocks: Sequence[AdvantageInputs], reduce: Reduce) -> Tensor:
    """Number the positions of the longest response of each group consecutively. Returns the first number of each group,
    and the total. Shapes: int64 [num_groups + 1]."""
    groups = [_numbers(inputs) for inputs in blocks]
    most = max((int(part.max()) + 1 for part in groups if len(part)), default=0)
    lengths = torch.zeros(int(reduce(torch.tensor([most]), "max")), dtype=torch.int64)
    for inputs, numbers in zip(blocks, groups, strict=True):
        lengths.scatter_reduce_(0, numbers, (inputs.mask > 0).sum(-1), "amax")
    lengths = reduce(lengths, "max")
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _cells(inputs: AdvantageInputs, starts: Tensor) -> Tensor:
    """Return the cell of each trained token, its group and its position among the trained tokens. Shapes: [B, T]."""
    return starts[_numbers(inputs)][:, None] + (inputs.mask > 0).cumsum(-1) - 1


def _cumulative_norms(inputs: AdvantageInputs) -> Tensor:
    assert inputs.score_norms is not None
    return masked(inputs.score_norms.double(), inputs.mask > 0).cumsum(-1)


def _numbers(inputs: AdvantageInputs) -> Tensor:
    assert inputs.group_ids is not None
    return inputs.group_ids.long()
