"""Experts: permutation of tokens to their experts and back, and linear layers of several experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.autograd.function import FunctionCtx

from mcore_rl.megatron.cpu.kernels.jit import kernel


def grouped_linear(x: torch.Tensor, weights: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    """Compute x W^T of each expert for its rows, in one output tensor.

    Shapes: x [N, i], first rows[0] rows for expert 0, then rows[1] for expert 1, ...; weights [o, i] -> [N, o].
    """
    return _GroupedLinear.apply(x, rows, *weights)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, rows: Sequence[int], *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.rows = rows
        out = x.new_empty(len(x), len(weights[0]))
        for part, result, weight in zip(x.split(rows), out.split(rows), weights, strict=True):
            torch.mm(part, weight.t(), out=result)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        grad_x, grads = torch.empty_like(x), grad.split(ctx.rows)
        # Writes into slices of one tensor: no concatenation of the experts' parts.
        for part, result, weight in zip(grads, grad_x.split(ctx.rows), weights, strict=True):
            torch.mm(part, weight, out=result)
        return grad_x, None, *(part.t() @ rows for part, rows in zip(grads, x.split(ctx.rows), strict=True))


def gather_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return x[index]. The gradient of a row is the sum of the gradients of its copies, in order.

    Shapes: x [R, ...], index int64 [N] -> [N, ...].
    """
    return _GatherRows.apply(x, index)


def add_rows(x: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the transpose of gather_rows: row i of the result is the sum of all x[n] with index[n] = i.

    Shapes: x [N, ...], index int64 [N] -> [rows, ...].
    """
    return _AddRows.apply(x, index, rows)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return _sums(grad, index, ctx.rows), None


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(index)
        return _sums(x, index, rows)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None


def _sums(x: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
    out = x.new_zeros((rows, *x.shape[1:]))
    _add(x.reshape(len(x), -1), index, out.view(rows, -1))
    return out


@kernel
def _add(x: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    for n in range(len(index)):
        row = index[n]
        for j in range(x.shape[1]):
            out[row, j] += x[n, j]
