"""Permutations of elements by vLLM's CPU kernels, found by packing element numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from mcore_rl.errors import WeightSyncError

Pack = Callable[[torch.Tensor], torch.Tensor]
"""Packs matrices. Shapes: [matrices, rows, columns], unchanged."""
_INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def unpacked(packed: torch.Tensor, pack: Pack) -> torch.Tensor:
    """Undo the kernel's permutation of one matrix.

    Shapes: packed [rows, columns] with elements permuted by `pack`.
    """
    order = _packing_order(tuple(packed.shape), packed.dtype, pack)
    integer = _INTEGERS[packed.dtype.itemsize]
    bits = packed.reshape(-1).view(integer)
    return torch.empty_like(bits).index_copy_(0, order, bits).view(packed.dtype).view(packed.shape)


@lru_cache(maxsize=8)
def _packing_order(shape: tuple[int, int], dtype: torch.dtype, pack: Pack) -> torch.Tensor:
    """Return the element number at each position of a packed matrix, found by packing the numbers' bit patterns.

    Shapes: int64 [rows * columns].
    """
    integer = _INTEGERS[dtype.itemsize]
    numbers = torch.arange(shape[0] * shape[1])
    shift = 8 * dtype.itemsize - 2  # the two highest bits stay 0, so that no pattern is a NaN
    order = torch.zeros_like(numbers)
    for digit in range(-(-int(numbers[-1]).bit_length() // shift)):
        pattern = ((numbers >> (digit * shift)) & ((1 << shift) - 1)).to(integer)
        packed = pack(pattern.view(dtype).view(1, *shape))
        order += packed.view(integer).reshape(-1).long() << (digit * shift)
    if not torch.equal(order.sort().values, numbers):
        raise WeightSyncError(f"vLLM's packing of {shape} {dtype} is not a permutation")
    return order
