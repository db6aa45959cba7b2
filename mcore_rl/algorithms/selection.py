"""Losses that treat a few tokens differently, chosen among all tokens of an update.

A micro-batch, or a rank, does not see the others, and the gradient must not depend on how the update is cut. So the
choice is made in four steps before the first backward pass, each a plain sum or independent of the layout:

    moments     sums over the update (count, advantages, log-probabilities), added over micro-batches and ranks
    scores      one number per token, from the moments and the token itself; the largest are chosen; -inf: never
    threshold   the score of the k-th largest over all ranks, k = count(number of trained tokens)
    chosen      score >= threshold; tokens that tie with the k-th are all chosen

A loss with needs.selection has the first three as methods, and finds the last in PolicyLossInputs.chosen. Random
choices take their randomness from a token's key, which names its sample and position, not its place in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mcore_rl.algorithms.interface import PolicyLoss, PolicyLossInputs

AllReduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks that hold tokens of the update, each token on exactly one of them."""

ROUNDS = 32  # as many as float32 has bits
SMALLEST_NORMAL, INFINITY = 0x00800000, 0x7F800000  # bit patterns of float32


class SelectiveLoss(PolicyLoss, Protocol):
    """A policy loss with needs.selection."""

    def moments(self, inputs: PolicyLossInputs) -> Tensor:
        """float64 [k]: sums over the trained tokens, the first of which is their number."""
        ...

    def scores(self, inputs: PolicyLossInputs, moments: Tensor, keys: Tensor) -> Tensor:
        """float32, shaped as logp: the larger, the sooner chosen; -inf: not eligible. Shapes: keys as logp, int64."""
        ...

    def count(self, num_tokens: int) -> int:
        """How many of `num_tokens` trained tokens to choose."""
        ...


def alone(tensor: Tensor) -> Tensor:
    """The sum over ranks where there is one."""
    return tensor


@torch.no_grad()
def choose(
    loss: SelectiveLoss, parts: Sequence[PolicyLossInputs], keys: Sequence[Tensor], all_reduce: AllReduce = alone
) -> list[Tensor]:
    """The chosen tokens of each of a rank's micro-batches, bool and shaped as its logp.

    Shapes: keys int64, as each part's logp (see token_keys). A rank without tokens passes an empty part.
    Collective: all ranks that all_reduce sums over.
    """
    moments = all_reduce(torch.stack([loss.moments(part) for part in parts]).sum(0))
    scores = [loss.scores(part, moments, key) for part, key in zip(parts, keys, strict=True)]
    number = loss.count(int(moments[0]))
    limit = threshold(torch.cat([score.flatten() for score in scores]), number, all_reduce)
    return [score >= limit for score in scores]


def choose_alone(loss: SelectiveLoss, inputs: PolicyLossInputs) -> Tensor:
    """inputs.chosen, or where that is None what is chosen if these are all tokens of the update, in their order."""
    if inputs.chosen is not None:
        return inputs.chosen & (inputs.mask > 0)
    keys = torch.arange(inputs.logp.numel(), device=inputs.logp.device).view(inputs.logp.shape)
    return choose(loss, [inputs], [keys])[0]


@torch.no_grad()
def covariance_moments(inputs: PolicyLossInputs) -> Tensor:
    """float64 [3]: number of trained tokens, sums of their advantages and of their log-probabilities."""
    assert inputs.advantages is not None
    selected = inputs.mask > 0
    of = [torch.where(selected, tensor, 0.0).sum(dtype=torch.float64) for tensor in (inputs.advantages, inputs.logp)]
    return torch.stack([selected.sum().double(), *of])


@torch.no_grad()
def covariances(inputs: PolicyLossInputs, moments: Tensor) -> Tensor:
    """Each token's term of the covariance of advantage and log-probability, (A - mean A) (logp - mean logp); -inf where
    a token is not trained. Means are those of the whole update; float32, computed in float64.

    Source: arXiv 2505.22617, section 4.2.
    """
    assert inputs.advantages is not None
    count, advantages, logp = moments.unbind()
    product = (inputs.advantages.double() - advantages / count) * (inputs.logp.double() - logp / count)
    return product.float().masked_fill(~(inputs.mask > 0), -torch.inf)


@torch.no_grad()
def threshold(scores: Tensor, count: int, all_reduce: AllReduce = alone) -> Tensor:
    """The `count`-th largest of the scores of all ranks, exactly: at least `count` scores are not below it, and fewer
    are above it. Where fewer than `count` scores are above -inf, the smallest of them or less; for 0, +inf.

    Bisection on the integers that order float32 as the numbers do: always 32 sums of one number, no transfer to the
    host, and no score leaves its rank.

    Shapes: scores float32 [N], without NaN -> float32 scalar.
    Collective: all ranks that all_reduce sums over, with the same count.
    """
    if count < 1:
        return torch.full((), torch.inf, device=scores.device)
    # What is not among a rank's own `count` largest is not among those of all ranks: it need not be counted 32 times.
    order = _ordered(scores.topk(min(count, len(scores)), sorted=False).values)
    # One above -inf to +inf.
    low = torch.full((), 1 - INFINITY, dtype=torch.int64, device=scores.device)
    high = torch.full((), INFINITY, dtype=torch.int64, device=scores.device)
    for _ in range(ROUNDS):
        middle = torch.div(low + high + 1, 2, rounding_mode="floor")
        enough = all_reduce((order >= middle).count_nonzero()) >= count
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle - 1)
    return _number(low)


def token_keys(samples: Tensor, positions: Tensor, seed: int) -> Tensor:
    """Names of tokens that no layout changes. `seed` is of the update: with the same one each time, the tokens at the
    same places of the batch would always be preferred.

    Shapes: samples, positions (of a token within its response, below 2^32) integer, any one shape -> int64.
    """
    salt = _mix(torch.tensor(seed, dtype=torch.int64)).to(samples.device)
    return ((samples.long() << 32) + positions.long()) ^ salt


def random_scores(keys: Tensor) -> Tensor:
    """A positive float32 per key, in an order as good as random: of 2^31 values, so that hardly any two are equal."""
    bits = (_mix(keys) >> 2) & 0x3FFFFFFFFFFFFFFF
    return (SMALLEST_NORMAL + bits % (INFINITY - SMALLEST_NORMAL)).to(torch.int32).view(torch.float32)


def _mix(keys: Tensor) -> Tensor:
    """SplitMix64's output function. Source: Steele, Lea, Flood, OOPSLA 2014; constants: mix13 of D. Stafford."""
    keys = keys + _signed(0x9E3779B97F4A7C15)
    keys = (keys ^ ((keys >> 30) & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9)
    keys = (keys ^ ((keys >> 27) & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB)
    return keys ^ ((keys >> 31) & 0x1FFFFFFFF)


def _signed(constant: int) -> int:
    return constant - (1 << 64)


def _ordered(scores: Tensor) -> Tensor:
    """Integers that compare as the numbers do; -0 is 0."""
    bits = scores.float().contiguous().view(torch.int32)
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def _number(order: Tensor) -> Tensor:
    magnitude = order.abs().to(torch.int32).view(torch.float32)
    return torch.where(order >= 0, magnitude, -magnitude)
