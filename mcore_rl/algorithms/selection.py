"""Selection of tokens, among all tokens of an update, that a loss treats differently.

A micro-batch or rank sees only its own tokens, and the gradient must not depend on how the update is split. Tokens are
therefore chosen in four steps before the first backward pass; each step is a plain sum or independent of the layout:

    moments     sums over the update (count, advantages, log-probabilities), added over micro-batches and ranks
    scores      one number per token, from the moments and the token itself; the largest are chosen; -inf: never
    threshold   the k-th largest score over all ranks, k = count(number of trained tokens)
    chosen      score >= threshold; all tokens that tie with the k-th are chosen

algorithm.high_entropy_share chooses likewise after a forward pass: the scores are the entropies of the tokens, and
k = max(1, floor(share n)) of n tokens. The policy loss of the other tokens is 0; they still count in the denominator.

A loss with needs.selection implements `moments`, `scores` and `count`, and reads the result from
PolicyLossInputs.chosen. Random scores depend on a token's key (sample and position), not on its micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import PolicyLoss, PolicyLossInputs

AllReduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks that hold tokens of the update; each token is on exactly one rank."""

ROUNDS = 32  # as many as float32 has bits
SMALLEST_NORMAL, INFINITY = 0x00800000, 0x7F800000  # bit patterns of float32


class SelectiveLoss(PolicyLoss, Protocol):
    """A policy loss with needs.selection."""

    def moments(self, inputs: PolicyLossInputs) -> Tensor:
        """Return the sums over the trained tokens, float64 [k]; the first is their number."""
        ...

    def scores(self, inputs: PolicyLossInputs, moments: Tensor, keys: Tensor) -> Tensor:
        """Return the scores, float32, shaped like logp (-inf: not eligible); the largest are chosen. keys: int64, like
        logp."""
        ...

    def count(self, num_tokens: int) -> int:
        """Number of tokens to choose among `num_tokens` trained tokens."""
        ...


def one_rank(tensor: Tensor) -> Tensor:
    """Return the tensor: the all-reduce of a single rank."""
    return tensor


@torch.no_grad()
def choose(
    loss: SelectiveLoss, parts: Sequence[PolicyLossInputs], keys: Sequence[Tensor], all_reduce: AllReduce = one_rank
) -> list[Tensor]:
    """Choose tokens in each of this rank's micro-batches. Returns one bool tensor per part, shaped like its logp.

    Shapes: keys int64, like the logp of each part (see token_keys). A rank without tokens passes an empty part.
    Collective: all ranks that all_reduce sums over.
    """
    # The moments must be global before any score is computed: they contain the means of the whole update.
    moments = all_reduce(torch.stack([loss.moments(part) for part in parts]).sum(0))
    scores = [loss.scores(part, moments, key) for part, key in zip(parts, keys, strict=True)]
    number = loss.count(int(moments[0]))
    limit = threshold(torch.cat([score.flatten() for score in scores]), number, all_reduce)
    return [score >= limit for score in scores]


@torch.no_grad()
def highest(scores: Sequence[Tensor], share: float, all_reduce: AllReduce = one_rank) -> list[Tensor]:
    """Choose the highest scores of all ranks: floor(share N) of N, but at least one if there is any, and all scores
    that tie with the lowest chosen one. Scores of -inf are never chosen and not among the N. Returns one bool tensor
    per part, shaped like it.

    Collective: all ranks that all_reduce sums over.
    """
    flat = torch.cat([score.flatten().float() for score in scores])
    total = int(all_reduce((flat > -torch.inf).count_nonzero()))
    limit = threshold(flat, min(total, max(1, int(share * total))), all_reduce)
    return [score.float() >= limit for score in scores]


def chosen_tokens(loss: SelectiveLoss, inputs: PolicyLossInputs) -> Tensor:
    """Return inputs.chosen; if it is None, choose as if `inputs` held all tokens of the update."""
    if inputs.chosen is not None:
        return inputs.chosen & (inputs.mask > 0)
    keys = torch.arange(inputs.logp.numel(), device=inputs.logp.device).view(inputs.logp.shape)
    return choose(loss, [inputs], [keys])[0]


@torch.no_grad()
def threshold(scores: Tensor, count: int, all_reduce: AllReduce = one_rank) -> Tensor:
    """Find the exact `count`-th largest score of all ranks: at least `count` scores are >= it and fewer are > it. If
    fewer than `count` scores are above -inf, returns the smallest of them or less. count = 0 returns +inf.

    Bisects over integers that have the same order as float32: 32 all-reduces of one number, no transfer to the host,
    and scores stay on their rank.

    Shapes: scores float32 [N], without NaN -> float32 scalar.
    Collective: all ranks that all_reduce sums over, with the same count.
    """
    if count < 1:
        return torch.full((), torch.inf, device=scores.device)
    # A score below the rank's own `count` largest cannot be among the global ones: exclude it from the 32 counts.
    order = _sortable_bits(scores.topk(min(count, len(scores)), sorted=False).values)
    # The search interval excludes -inf and includes +inf.
    low = torch.full((), 1 - INFINITY, dtype=torch.int64, device=scores.device)
    high = torch.full((), INFINITY, dtype=torch.int64, device=scores.device)
    # Invariant: at least `count` scores are >= low, and fewer than `count` are > high.
    for _ in range(ROUNDS):
        middle = torch.div(low + high + 1, 2, rounding_mode="floor")
        enough = all_reduce((order >= middle).count_nonzero()) >= count
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle - 1)
    return _from_sortable_bits(low)


@torch.no_grad()
def mean_bound(values: Tensor, bound: float, all_reduce: AllReduce = one_rank) -> Tensor:
    """Find the largest limit such that the values of all ranks up to it have a mean of at most `bound`. Dropping the
    larger values brings the mean down to the bound with the fewest drops. Equal values are kept or dropped together.

    Bisects like `threshold`: the mean of the values up to a limit does not fall if the limit rises.

    Shapes: values float32 [N], at least 0 -> float32 scalar; negative if no value can be kept.
    Collective: all ranks that all_reduce sums over, with the same bound.
    """
    order, exact = _sortable_bits(values), values.double()
    low = torch.full((), -1, dtype=torch.int64, device=values.device)  # below 0: nothing is kept
    high = torch.full((), INFINITY, dtype=torch.int64, device=values.device)
    # Invariant: the values up to `low` have a mean within the bound, and a larger limit than `high` is not one.
    for _ in range(ROUNDS):
        middle = torch.div(low + high + 1, 2, rounding_mode="floor")
        kept = order <= middle
        total, count = all_reduce(torch.stack([exact.masked_fill(~kept, 0.0).sum(), kept.sum().double()])).unbind()
        within = total <= bound * count
        low, high = torch.where(within, middle, low), torch.where(within, high, middle - 1)
    return _from_sortable_bits(low)


def token_keys(samples: Tensor, positions: Tensor, seed: int) -> Tensor:
    """Return layout-independent keys of tokens. `seed` must differ between updates; otherwise the same places of the
    batch would always be preferred.

    Shapes: samples, positions (within the response, below 2^32): integers of any one shape -> int64.
    """
    salt = _mix(torch.tensor(seed, dtype=torch.int64)).to(samples.device)
    return ((samples.long() << 32) + positions.long()) ^ salt


def random_scores(keys: Tensor) -> Tensor:
    """Return a pseudo-random positive float32 per key, one of about 2^31 values, so ties are rare."""
    bits = (_mix(keys) >> 2) & 0x3FFFFFFFFFFFFFFF
    return (SMALLEST_NORMAL + bits % (INFINITY - SMALLEST_NORMAL)).to(torch.int32).view(torch.float32)


def _mix(keys: Tensor) -> Tensor:
    """Apply SplitMix64's output function. Source: Steele, Lea, Flood, OOPSLA 2014; constants: mix13 of D. Stafford."""
    keys = keys + _signed(0x9E3779B97F4A7C15)
    keys = (keys ^ ((keys >> 30) & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9)
    keys = (keys ^ ((keys >> 27) & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB)
    return keys ^ ((keys >> 31) & 0x1FFFFFFFF)


def _signed(constant: int) -> int:
    return constant - (1 << 64)


def _sortable_bits(scores: Tensor) -> Tensor:
    """Return the integers with the same order as the float32 scores; -0 becomes 0."""
    bits = scores.float().contiguous().view(torch.int32)
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def _from_sortable_bits(order: Tensor) -> Tensor:
    magnitude = order.abs().to(torch.int32).view(torch.float32)
    return torch.where(order >= 0, magnitude, -magnitude)
