"""Kernel of SwiGLU with each token weighted by its routing probability."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.autograd.function import FunctionCtx

from mcore_rl.megatron.cpu.kernels.jit import kernel, row_sum

_BLOCK_ELEMENTS = 1 << 16
"""Sigmoids are computed by torch, which vectorizes the exponential, in blocks that stay in a core's cache."""


def weighted_swiglu(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up * weight; the columns of x are gate, then up.

    Shapes: x [N, 2 f], weights [N] -> [N, f].
    """
    return _WeightedSwiGLU.apply(x, weights)


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weights)
        out = x.new_empty(len(x), x.shape[1] // 2)
        for rows, sigmoid in _sigmoids(x):
            _forward(x[rows], sigmoid, weights[rows], out[rows])
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x, grad_weights = torch.empty_like(x), torch.empty_like(weights)
        for rows, sigmoid in _sigmoids(x):
            _backward(grad[rows], x[rows], sigmoid, weights[rows], grad_x[rows], grad_weights[rows])
        return grad_x, grad_weights


def _sigmoids(x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield blocks of rows with the sigmoids of their gates; the next block reuses the memory."""
    width = x.shape[1] // 2
    step = max(_BLOCK_ELEMENTS // max(width, 1), 1)
    scratch = x.new_empty(min(step, len(x)), width)
    for first in range(0, len(x), step):
        rows = slice(first, min(first + step, len(x)))
        yield rows, torch.sigmoid(x[rows, :width], out=scratch[: rows.stop - rows.start])


@row_sum
def _product(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> float:
    total = a.dtype.type(0)
    for j in range(len(a)):
        total += a[j] * b[j] * c[j] * d[j]
    return total


@kernel
def _forward(x: np.ndarray, sigmoid: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    rows, width = sigmoid.shape
    for i in range(rows):
        for j in range(width):
            out[i, j] = x[i, j] * sigmoid[i, j] * x[i, width + j] * weights[i]


@kernel
def _backward(
    grad: np.ndarray,
    x: np.ndarray,
    sigmoid: np.ndarray,
    weights: np.ndarray,
    grad_x: np.ndarray,
    grad_weights: np.ndarray,
) -> None:
    rows, width = sigmoid.shape
    one = x.dtype.type(1)
    for i in range(rows):
        weight = weights[i]
        grad_weights[i] = _product(grad[i], x[i, :width], sigmoid[i], x[i, width:])
        for j in range(width):
            gate, up, s, g = x[i, j], x[i, width + j], sigmoid[i, j], grad[i, j]
            silu = gate * s
            grad_x[i, j] = g * weight * up * s * (one + gate * (one - s))
            grad_x[i, width + j] = g * weight * silu
