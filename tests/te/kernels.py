"""TransformerEngine's kernels in plain torch on the CPU, with the signatures of 2.11. test_kernels.py compares each
with its definition in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor
DTYPES = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16, "kFloat16": torch.float16}


def generic_gemm(
    a: Tensor,
    transpose_a: bool,
    b: Tensor,
    transpose_b: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_input: Tensor | None,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    split_accumulator: bool,
    **_: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """op(b) @ op(a), cuBLAS's order of columns; with `grad` also the gradient of a bias, sum of b's rows.

    Shapes: forward a [out, in] transposed, b [..., in]; gradient of the input a [out, in], b [..., out]; gradient of
    the weight a [..., in], b [..., out] transposed.
    """
    assert not gelu
    assert quantizer is None
    left, right = b.flatten(0, -2).float(), a.flatten(0, -2).float()
    product = (left.t() if transpose_b else left) @ (right.t() if transpose_a else right)
    if bias is not None and not grad:
        product += bias.float()
    if not transpose_b:
        product = product.unflatten(0, b.shape[:-1])
    if out is None:
        return product.to(DTYPES[out_dtype[1]] if out_dtype else b.dtype), _bias_gradient(b, bias, grad), None, None
    out.add_(product) if accumulate else out.copy_(product)
    return out, _bias_gradient(b, bias, grad), None, None


def _bias_gradient(b: Tensor, bias: Tensor | None, grad: bool) -> Tensor | None:
    return b.flatten(0, -2).float().sum(0).to(bias.dtype) if bias is not None and grad else None


def te_general_grouped_gemm(
    a: Sequence[Tensor],
    transpose_a: bool,
    b: Sequence[Tensor],
    transpose_b: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    rows: Sequence[int],
    bias: Sequence[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_input: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    split_accumulator: bool,
    num_sms: int,
) -> Any:
    """Run generic_gemm for every pair. Results go to `out`, or to consecutive parts of `rows` rows of its only tensor.
    The product of an expert without tokens is zero. Biases without elements are absent; with `grad`, their gradients
    are written to them."""
    parts = out[0].split(list(rows)) if single_output else out
    for left, right, part, offset in zip(a, b, parts, bias, strict=True):
        given = offset if offset.numel() else None
        if right.numel() == 0:
            if transpose_b and not accumulate:
                part.zero_()
            if given is not None and grad:
                given.zero_()
        elif part.numel():
            _, gradient, _, _ = generic_gemm(
                left, transpose_a, right, transpose_b, part, None, None, given, None, False, None, grad, None, 0,
                accumulate, split_accumulator,
            )  # fmt: skip
            if gradient is not None:
                offset.copy_(gradient)
    return bias


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, epsilon: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    """Return (factor * x / rms, None, 1 / rms), with rms^2 = mean(x^2) + epsilon over the last axis. The factor is the
    weight or, if it is zero-centered, 1 + weight."""
    inverse = (x.float().square().mean(-1) + epsilon).rsqrt()
    return (x.float() * inverse[..., None] * (weight.float() + zero_centered)).to(x.dtype), None, inverse


def rmsnorm_bwd(
    gradient: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight."""
    inverse = inverse.view(*x.shape[:-1], 1)
    normed, weighted = x.float() * inverse, gradient.float() * (weight.float() + zero_centered)
    of_x = inverse * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    of_weight = (gradient.float() * normed).flatten(0, -2).sum(0)
    return of_x.to(x.dtype), of_weight.to(weight.dtype)


def fused_rope_forward(
    t: Tensor, angles: Tensor, start: Any, layout: Any, interleaved: bool, offsets: Tensor, cp_size: int, cp_rank: int
) -> Tensor:
    """Packed sequences rotated by the angles of their positions.

    Shapes: t [tokens, heads, size]; angles [positions, 1, 1, rotated]; offsets int32 [sequences + 1], of the whole
    sequences.
    """
    assert not interleaved
    assert (angles.dtype, offsets.dtype) == (torch.float32, torch.int32)
    return _rotated(t, angles[_positions(offsets, cp_size, cp_rank), 0, 0], sign=1)


def fused_rope_backward(gradient: Tensor, angles: Tensor, *options: Any) -> Tensor:
    """Rotate back. `options`: the other arguments of fused_rope_forward; TransformerEngine 2.9 passes no `start`."""
    *_, interleaved, offsets, cp_size, cp_rank = options
    assert not interleaved
    return _rotated(gradient, angles[_positions(offsets, cp_size, cp_rank), 0, 0], sign=-1)


def _rotated(t: Tensor, angles: Tensor, sign: int) -> Tensor:
    """Rotate the pairs (i, i + rotated / 2); elements after the rotated part are unchanged."""
    size = angles.shape[-1]
    rotated, rest = t[..., :size].float(), t[..., size:]
    first, second = rotated.chunk(2, -1)
    cos, sin = angles.cos()[:, None], sign * angles.sin()[:, None]
    return torch.cat(((rotated * cos + torch.cat((-second, first), -1) * sin).to(t.dtype), rest), -1)


def _positions(offsets: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Return the positions of a rank's tokens: with context parallelism chunk `cp_rank` of the 2 cp_size chunks of each
    sequence, and the chunk with the same distance from the end. Source: TransformerEngine,
    common/fused_rope/fused_rope.cu."""
    positions: list[int] = []
    for length in offsets.diff().tolist():
        if cp_size == 1:
            positions += range(length)
            continue
        chunk = length // (2 * cp_size)
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            positions += range(index * chunk, (index + 1) * chunk)
    return torch.tensor(positions, dtype=torch.long)


def multi_tensor_l2norm(
    chunk: int, overflow: Any, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the norm over all tensors [1], and the norm of each tensor."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]]) if lists[0] else torch.zeros(1)
    return norms.norm().view(1), norms if per_tensor else None


def multi_tensor_scale(chunk: int, overflow: Any, lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Compute out = in * factor."""
    for given, out in zip(*lists, strict=True):
        out.copy_(given * factor)


def multi_tensor_adam(
    chunk: int,
    overflow: Any,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Run AdamW (mode 1) on (gradient, parameter, first moment, second moment), in place."""
    assert mode == 1
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, mean, square in zip(*lists, strict=True):
        assert {each.dtype for each in (gradient, parameter, mean, square)} == {torch.float32}
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        parameter.sub_(lr * ((mean / first) / ((square / second).sqrt() + epsilon) + weight_decay * parameter))


KERNELS = {
    each.__name__: each
    for each in (
        generic_gemm,
        te_general_grouped_gemm,
        rmsnorm_fwd,
        rmsnorm_bwd,
        fused_rope_forward,
        fused_rope_backward,
        multi_tensor_l2norm,
        multi_tensor_scale,
        multi_tensor_adam,
    )
}
