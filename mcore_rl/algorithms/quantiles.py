"""Quantiles of probability ratios over all tokens of an update, which no rank and no micro-batch sees at once.

Every log ratio is rounded to one of few values, and what is reported is how many were rounded to which: such counts
add up, whatever the cut. The values are the middles of floating point's own bins of the absolute log ratio, STEPS of
them between a power of two and the next:

    |log r| < SMALLEST                  0
    SMALLEST <= |log r| < LARGEST       at most 1 / (2 STEPS) of |log r| away, with its sign

So a quantile of ratios near 1.2 is within 0.3 % of the true one, and a ratio within 0.03 % of 1 is 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mcore_rl.types import Metric, Quantile

STEPS = 32
SMALLEST, LARGEST = 2.0**-12, 32.0
QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}

# What is left of a float32 when its bits are shifted: sign, 8 bits of exponent, and the mantissa's part of STEPS.
_SHIFT = 23 - (STEPS.bit_length() - 1)
_CODES = 1 << (32 - _SHIFT)
_FIRST, _LAST = (int(np.float32(bound).view(np.int32)) >> _SHIFT for bound in (SMALLEST, LARGEST))
NUM_COUNTS = 1 + 2 * (_LAST - _FIRST)


def _values() -> list[float]:
    """The ratio that each count is of: of log ratio 0, of the positive ones from the smallest up, of the negatives."""
    edges = (np.arange(_FIRST, _LAST + 1, dtype=np.int32) << _SHIFT).view(np.float32).astype(np.float64)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    return [1.0, *map(math.exp, middles), *(math.exp(-middle) for middle in middles)]


_VALUES = _values()


@torch.no_grad()
def count_rounded(log_ratio: Tensor, selected: Tensor) -> Tensor:
    """How many selected tokens are rounded to which value.

    Shapes: any one shape, log_ratio 0 where `selected` (bool) is false -> float64 [NUM_COUNTS]; what is not finite, or
    LARGEST or beyond, is in none.
    """
    bits = log_ratio.float().contiguous().view(torch.int32).flatten()
    codes = (bits >> _SHIFT).bitwise_and_(_CODES - 1).long()
    counts = torch.zeros(_CODES, dtype=torch.int64, device=codes.device)
    # Integers, so that the order of additions on a device is no matter; bincount would wait for it.
    counts.scatter_add_(0, codes, counts.new_ones(1).expand(len(codes)))
    signed = counts.view(2, -1)  # a negative number's first bit is set
    zero = signed[:, :_FIRST].sum() - selected.logical_not().count_nonzero()
    return torch.cat([zero[None], signed[:, _FIRST:_LAST].flatten()]).double()


def ratio_quantiles(counts: Sequence[float]) -> dict[str, Metric]:
    """QUANTILES of the ratios that were counted. Shapes: counts [NUM_COUNTS], whole numbers."""
    occupied = Counter({value: int(count) for value, count in zip(_VALUES, counts, strict=True) if count})
    return {name: Quantile(fraction, occupied) for name, fraction in QUANTILES.items()}
