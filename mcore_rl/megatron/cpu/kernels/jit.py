"""Compilation of the kernels.

Results must not depend on memory addresses. Compiled code checks at run time whether arrays overlap and has a different
version for each case. Code that writes arrays therefore uses strict floating-point arithmetic, which is the same in
both versions. Only sums over inputs may be reordered, so that they use vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba
import numpy as np
import torch

Result = TypeVar("Result")
_storages_are_resized = False


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a kernel at the first call for each dtype; the result is cached on disk if possible. Arguments that are
    tensors are passed as arrays."""
    compiled = _compile(function, nogil=True)

    def launch(*arguments: torch.Tensor | np.ndarray | float) -> None:
        compiled(*(_array(each) if isinstance(each, torch.Tensor) else each for each in arguments))

    return launch


def row_sum(function: Callable[..., float]) -> Callable[..., float]:
    """Compile a helper of kernels that only reads rows and returns a sum, which the compiler may reorder.

    Not fastmath=True: it assumes that no NaN or infinity occurs, but these must reach the checks that stop the run.
    """
    return _compile(function, fastmath={"reassoc", "contract", "nsz"})


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return an array that shares the tensor's memory. tensor.numpy() takes a third of the time of DLPack, but makes
    the storage permanently non-resizable."""
    return np.from_dlpack(tensor.detach()) if _storages_are_resized else tensor.numpy()


def resize_storages() -> None:
    """Keep storages of kernel arguments resizable from now on, because recomputation releases them."""
    global _storages_are_resized
    _storages_are_resized = True


def _compile(function: Callable[..., Result], **options: object) -> Callable[..., Result]:
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no writable cache directory
        return numba.njit(**options)(function)
