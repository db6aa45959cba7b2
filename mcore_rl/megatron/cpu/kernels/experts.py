"""Grouped linear layers: several experts, rows sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.function import FunctionCtx


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
        for part, result, weight in zip(grads, grad_x.split(ctx.rows), weights, strict=True):
            torch.mm(part, weight, out=result)
        return grad_x, None, *(part.t() @ rows for part, rows in zip(grads, x.split(ctx.rows), strict=True))
