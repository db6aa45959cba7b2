"""Quantiles of probability ratios over all tokens of an update, computed from histograms that ranks can add.

Each log ratio is rounded to the middle of a bin, and the counts per bin are summed over micro-batches and ranks. The
bins follow the float32 format: STEPS bins of the absolute log ratio between one power of two and the next.

    |log r| < SMALLEST                  rounded to 0
    SMALLEST <= |log r| < LARGEST       rounded with its sign, error at most |log r| / (2 STEPS)

A quantile near ratio 1.2 is accurate to 0.3 %; a ratio within 0.03 % of 1 is counted as 1.
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

# Shifting a float32's bits by _SHIFT leaves the sign, 8 exponent bits, and log2(STEPS) mantissa bits: the bin's code.
_SHIFT = 23 - (STEPS.bit_length() - 1)
_CODES = 1 << (32 - _SHIFT)
_FIRST, _LAST = (int(np.float32(bound).view(np.int32)) >> _SHIFT for bound in (SMALLEST, LARGEST))
NUM_COUNTS = 1 + 2 * (_LAST - _FIRST)


def _values() -> list[float]:
    """Return the ratio of each bin: log ratio 0, then positive log ratios in increasing order, then negative ones."""
    edges = (np.arange(_FIRST, _LAST + 1, dtype=np.int32) << _SHIFT).view(np.float32).astype(np.float64)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    return [1.0, *map(math.exp, middles), *(math.exp(-middle) for middle in middles)]


_VALUES = _values()


@torch.no_grad()
def count_rounded(log_ratio: Tensor, selected: Tensor) -> Tensor:
    """Count the selected tokens per bin. Values that are not finite, or at least LARGEST, are not counted.

    Shapes: any one shape, log_ratio 0 where `selected` (bool) is false -> float64 [NUM_COUNTS].
    """
    bits = log_ratio.float().contiguous().view(torch.int32).flatten()
    codes = (bits >> _SHIFT).bitwise_and_(_CODES - 1).long()
    counts = torch.zeros(_CODES, dtype=torch.int64, device=codes.device)
    # Integer additions do not depend on their order. torch.bincount would synchronize with the device.
    counts.scatter_add_(0, codes, counts.new_ones(1).expand(len(codes)))
    signed = counts.view(2, -1)  # row 0: positive numbers, row 1: negative (sign bit set)
    zero = signed[:, :_FIRST].sum() - selected.logical_not().count_nonzero()
    return torch.cat([zero[None], signed[:, _FIRST:_LAST].flatten()]).double()


def ratio_quantiles(counts: Sequence[float]) -> dict[str, Metric]:
    """Compute QUANTILES of the counted ratios. Shapes: counts [NUM_COUNTS], whole numbers."""
    occupied = Counter({value: int(count) for value, count in zip(_VALUES, counts, strict=True) if count})
    return {name: Quantile(fraction, occupied) for name, fraction in QUANTILES.items()}
