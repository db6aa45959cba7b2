"""Squared norms of the policy's score with respect to the logits, from hidden states, without materializing all logits.

For the sampled token y of a distribution p over the vocabulary, with logits z divided by the temperature:

    |d log p_y / d z|^2 = sum_k ([k = y] - p_k)^2 = 1 - 2 p_y + sum_k p_k^2

Like the log-probabilities (logprobs.py), the sums are computed tile by tile on each tensor-parallel rank's vocabulary
shard; the ranks exchange one MAX and one SUM all-reduce. No gradient.

Source: the Logit-Gradient Proxy of the optimal token baseline, arXiv 2602.07078.
"""

from __future__ import annotations

import torch

from mcore_rl.megatron.step.tiles import Options, Projection, compute_dtype, targets_in_tile, tiles


@torch.no_grad()
def linear_score_norms(hidden: torch.Tensor, projection: Projection, targets: torch.Tensor) -> torch.Tensor:
    """Compute 1 - 2 p_y + sum p^2 for the softmax p of the projection of `hidden` and the targets y; between 0 and 2.

    Shapes: hidden [T, h]; targets int64 [T], global token ids; result float32 [T] (float64 for float64 inputs).
    Collective: all ranks of projection.group (None: it has the whole vocabulary), with equal hidden and targets.
    """
    weight, options = projection.weight, projection.options(hidden)
    statistics = _statistics(hidden, weight, targets - options.first_entry(weight), options)
    maximum, total, squares, target_logit = statistics
    own_maximum = maximum.clone()
    projection.reduce(maximum, largest=True)
    _rescale(total, squares, own_maximum - maximum)
    projection.reduce(statistics[1:])
    probability = torch.exp(target_logit - maximum) / total
    # The exact value is not negative; rounding may be.
    return (1 - 2 * probability + squares / total.square()).clamp_(min=0)


def _statistics(
    hidden: torch.Tensor, weight: torch.Tensor, local_targets: torch.Tensor, options: Options
) -> torch.Tensor:
    """Compute sums over this rank's vocabulary: [4, T], in its rows: maximum m, sum exp(z - m), sum exp(2 (z - m)), and
    the target's logit (0 if another rank holds it)."""
    statistics = torch.zeros((4, hidden.shape[0]), dtype=compute_dtype(hidden), device=hidden.device)
    # Below every logit; -inf would give -inf - -inf = nan.
    statistics[0] = torch.finfo(statistics.dtype).min / 2
    for tile, logits in tiles(hidden, weight, options):
        maximum, total, squares, target_logit = (row[tile.rows] for row in statistics)
        index, inside = targets_in_tile(local_targets, tile)
        target_logit += logits.gather(1, index).squeeze(1) * inside
        new_maximum = torch.maximum(maximum, logits.amax(1))
        _rescale(total, squares, maximum - new_maximum)
        maximum.copy_(new_maximum)
        exponentials = logits.sub_(new_maximum[:, None]).exp_()
        total += exponentials.sum(1)
        squares += exponentials.square_().sum(1)
    return statistics


def _rescale(total: torch.Tensor, squares: torch.Tensor, shift: torch.Tensor) -> None:
    """Rescale the two sums in place to a maximum that is larger by -shift."""
    factor = torch.exp(shift)
    total.mul_(factor)
    squares.mul_(factor.square_())
