"""Stand-ins for kernels, compared with their definitions in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.te import kernels

Tensor = torch.Tensor


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)


def gemm(a: Tensor, ta: bool, b: Tensor, tb: bool, **changes: object) -> tuple[Tensor, Tensor | None]:
    given = {"out": None, "bias": None, "grad": False, "accumulate": False} | changes
    return kernels.generic_gemm(
        a, ta, b, tb, given["out"], None, None, given["bias"], None, False, None, given["grad"], None, 0,
        given["accumulate"], False,
    )[:2]  # fmt: skip


def test_gemm_is_a_linear_layer_forward_and_its_two_gradients_backward() -> None:
    x, w, bias, gradient = random(3, 2, 5), random(7, 5, seed=1), random(7, seed=2), random(3, 2, 7, seed=3)
    x64, w64, bias64 = (t.double().requires_grad_() for t in (x, w, bias))
    y = torch.nn.functional.linear(x64, w64, bias64)
    y.backward(gradient.double())
    close(gemm(w, True, x, False, bias=bias)[0], y)
    close(gemm(w, False, gradient, False)[0], x64.grad)
    of_weight, of_bias = gemm(x, False, gradient, True, bias=bias, grad=True)
    close(of_weight, w64.grad)
    close(of_bias, bias64.grad)
    accumulated = torch.ones(7, 5)
    gemm(x, False, gradient, True, out=accumulated, accumulate=True)
    close(accumulated, w64.grad + 1)


def grouped_gemm(
    a: Sequence[Tensor], ta: bool, b: Sequence[Tensor], tb: bool, out: list[Tensor], bias: list[Tensor] | None = None,
    *, single_output: bool = False, grad: bool = False,
) -> None:  # fmt: skip
    """TransformerEngine passes tensors without elements for absent biases."""
    kernels.te_general_grouped_gemm(
        a, ta, b, tb, out, None, [4, 0, 2], bias or [torch.empty(0)] * 3, None, single_output, None, grad, None, 0,
        False, False, 1,
    )  # fmt: skip


def test_grouped_gemm_expert_without_tokens_gives_zero() -> None:
    rows, weights = [4, 0, 2], [random(3, 5, seed=seed) for seed in range(3)]
    x = random(6, 5, seed=9)
    out = torch.full((6, 3), torch.nan)
    grouped_gemm(weights, True, x.split(rows), False, [out], single_output=True)
    expected = [part.double() @ weight.double().t() for part, weight in zip(x.split(rows), weights, strict=True)]
    close(out, torch.cat(expected))
    gradients = [torch.full((3, 5), torch.nan) for _ in rows]
    grouped_gemm(x.split(rows), False, out.split(rows), True, gradients, grad=True)
    close(gradients[1], torch.zeros(3, 5))
    close(gradients[2], out.split(rows)[2].double().t() @ x.split(rows)[2].double())


def test_grouped_gemm_adds_and_differentiates_biases_of_experts() -> None:
    rows, weights = [4, 0, 2], [random(3, 5, seed=seed) for seed in range(3)]
    x, biases = random(6, 5, seed=9), [random(3, seed=10 + seed) for seed in range(3)]
    out = torch.full((6, 3), torch.nan)
    grouped_gemm(weights, True, x.split(rows), False, [out], biases, single_output=True)
    close(out[4:], torch.nn.functional.linear(x[4:].double(), weights[2].double(), biases[2].double()))
    gradients, of_biases = [torch.empty(3, 5) for _ in rows], [torch.full((3,), torch.nan) for _ in rows]
    grouped_gemm(x.split(rows), False, out.split(rows), True, gradients, of_biases, grad=True)
    for found, part in zip(of_biases, out.split(rows), strict=True):
        close(found, part.double().sum(0))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rmsnorm_and_its_gradients_are_autograds(zero_centered: bool) -> None:
    x, w, gradient = random(4, 6), random(6, seed=1), random(4, 6, seed=2)
    x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
    y = torch.nn.functional.rms_norm(x64, (6,), w64 + zero_centered, 1e-3)
    y.backward(gradient.double())
    found, _, inverse = kernels.rmsnorm_fwd(x, w, 1e-3, None, None, None, 0, zero_centered)
    close(found, y)
    of_x, of_w = kernels.rmsnorm_bwd(gradient, x, inverse, w, 0, zero_centered)
    close(of_x, x64.grad)
    close(of_w, w64.grad)


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_rope_turns_each_pair_by_the_angle_of_its_position_and_back(size: int, rank: int) -> None:
    angles = random(16, 1, 1, 4, seed=4)
    angles[..., 2:] = angles[..., :2]
    lengths = [8, 4]
    offsets = torch.tensor([0, 8, 12], dtype=torch.int32)
    chunks = [torch.arange(length).chunk(2 * size) for length in lengths]
    places = [torch.arange(n) if size == 1 else torch.cat((c[rank], c[2 * size - 1 - rank]))
              for n, c in zip(lengths, chunks, strict=True)]  # fmt: skip
    t = random(sum(lengths) // size, 3, 6)
    found = kernels.fused_rope_forward(t, angles, None, None, False, offsets, size, rank)
    turn = angles[torch.cat(places), 0, 0, :2].double()[:, None]
    pairs = torch.complex(t[..., :2].double(), t[..., 2:4].double()) * torch.polar(torch.ones_like(turn), turn)
    close(found, torch.cat((pairs.real, pairs.imag, t[..., 4:].double()), -1))
    close(kernels.fused_rope_backward(found, angles, None, None, False, offsets, size, rank), t)


def test_adam_is_torchs_adamw() -> None:
    parameter, gradient = random(5), random(5, seed=1)
    theirs = parameter.double().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    mean, square = torch.zeros(5), torch.zeros(5)
    for step in (1, 2, 3):
        theirs.grad = gradient.double()
        optimizer.step()
        lists = [[gradient], [parameter], [mean], [square]]
        kernels.multi_tensor_adam(0, None, lists, 0.1, 0.8, 0.9, 1e-6, step, 1, 1, 0.2)
    close(parameter, theirs)


def test_norms_and_scales_are_over_all_tensors() -> None:
    tensors = [random(3), random(2, 2, seed=1)]
    total, each = kernels.multi_tensor_l2norm(0, None, [tensors], True)
    close(total, torch.cat([t.flatten() for t in tensors]).double().norm().view(1))
    close(each, torch.stack([t.double().norm() for t in tensors]))
    out = [torch.empty(3), torch.empty(2, 2)]
    kernels.multi_tensor_scale(0, None, [tensors, out], 0.5)
    close(out[1], tensors[1].double() / 2)
