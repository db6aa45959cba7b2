"""Kernel of the rotary position embedding of packed sequences."""

from __future__ import annotations

import numpy as np
import torch
from torch.autograd.function import FunctionCtx

from mcore_rl.megatron.cpu.kernels.jit import kernel


def rotate(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate the first d_rot dimensions of each head, pairing their halves: (a, b) -> (a cos - b sin, b cos + a sin).

    Shapes: t [T, heads, d]; cos, sin [P, d_rot], d_rot <= d; positions int64 [T], rows of the tables.
    """
    return _Rotary.apply(t, cos, sin, positions)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin, positions)
        out = torch.empty(t.shape, dtype=t.dtype)
        _rotate(t.contiguous(), cos, sin, positions, out)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        cos, sin, positions = ctx.saved_tensors
        # The transpose of a rotation is the rotation with the halves of the sines exchanged and negated.
        transposed = -sin.roll(sin.shape[1] // 2, 1)
        out = torch.empty(grad.shape, dtype=grad.dtype)
        _rotate(grad.contiguous(), cos, transposed, positions, out)
        return out, None, None, None


@kernel
def _rotate(t: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
    tokens, heads, width = t.shape
    rotated = cos.shape[1]
    half = rotated // 2
    for i in range(tokens):
        c, s = cos[positions[i]], sin[positions[i]]
        for h in range(heads):
            for j in range(half):
                a, b = t[i, h, j], t[i, h, j + half]
                out[i, h, j] = a * c[j] - b * s[j]
                out[i, h, j + half] = b * c[j + half] + a * s[j + half]
            for j in range(rotated, width):
                out[i, h, j] = t[i, h, j]
