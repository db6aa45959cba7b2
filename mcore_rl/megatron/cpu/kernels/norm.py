"""RMSNorm kernel."""

from __future__ import annotations

import numpy as np
import torch
from torch.autograd.function import FunctionCtx

from mcore_rl.megatron.cpu.kernels.jit import kernel, row_sum


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Shapes: x [..., h], weight [h].
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, scale = torch.empty_like(rows), rows.new_empty(len(rows))
        # A copy: an array would make the weight's storage (DDP's buffer) non-resizable, and offloading resizes it.
        _forward(rows, weight.clone(), eps, out, scale)
        ctx.save_for_backward(rows, weight, scale)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        rows, weight, scale = ctx.saved_tensors
        # The kernel adds to grad_weight row by row, so it starts with zeros; grad_rows is overwritten.
        grad_rows, grad_weight = torch.empty_like(rows), torch.zeros_like(weight)
        _backward(grad.reshape(rows.shape), rows, weight.clone(), scale, grad_rows, grad_weight)
        return grad_rows.view(grad.shape), grad_weight, None


@row_sum
def _square(a: np.ndarray) -> float:
    total = a.dtype.type(0)
    for j in range(len(a)):
        total += a[j] * a[j]
    return total


@row_sum
def _product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> float:
    total = a.dtype.type(0)
    for j in range(len(a)):
        total += a[j] * b[j] * c[j]
    return total


@kernel
def _forward(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray, scale: np.ndarray) -> None:
    rows, width = x.shape
    for i in range(rows):
        s = x.dtype.type(1 / np.sqrt(_square(x[i]) / width + eps))
        scale[i] = s
        for j in range(width):
            out[i, j] = x[i, j] * s * weight[j]


@kernel
def _backward(
    grad: np.ndarray, x: np.ndarray, weight: np.ndarray, scale: np.ndarray, grad_x: np.ndarray, grad_weight: np.ndarray
) -> None:
    rows, width = x.shape
    for i in range(rows):
        s = scale[i]
        along = x.dtype.type(_product(grad[i], weight, x[i]) * s * s * s / width)
        for j in range(width):
            grad_weight[j] += grad[i, j] * x[i, j] * s
            grad_x[i, j] = grad[i, j] * weight[j] * s - x[i, j] * along
