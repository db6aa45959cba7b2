"""How the kernels are compiled.

Bits must not depend on where memory happens to lie: a compiler checks at run time whether arrays overlap and has
other code for each answer. So everything that stores is strict arithmetic, the same in both, and only sums over what
is read may be reordered, which is what makes them vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

_storages_are_resized = False


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compiles at the first call for each dtype, once per machine where a cache can be written."""
    return _compile(function, nogil=True)


def row_sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for kernels that reads rows, stores nothing and returns a sum, in an order of the compiler's choice.

    fastmath=True would do more: it assumes that there is no NaN and no infinity, which must stop a run.
    """
    return _compile(function, fastmath={"reassoc", "contract", "nsz"})


def array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory. tensor.numpy() costs a third of what DLPack costs, but fixes the size of the storage for
    good."""
    return np.from_dlpack(tensor.detach()) if _storages_are_resized else tensor.numpy()


def resize_storages() -> None:
    """From now on the storages of tensors that kernels see stay resizable: recomputation releases them."""
    global _storages_are_resized
    _storages_are_resized = True


def takes(tensor: torch.Tensor) -> bool:
    """Whether the kernels know the tensor's dtype (numpy has no bfloat16)."""
    return tensor.dtype in (torch.float32, torch.float64)


def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no directory to keep compiled code in
        return numba.njit(**options)(function)
