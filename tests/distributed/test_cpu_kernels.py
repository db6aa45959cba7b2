"""Kernels of the CPU backend compared in float64 with the torch operations that they replace, and their use in the
model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from mcore_rl.megatron import cpu
from mcore_rl.megatron.cpu.kernels import experts, norm, rotary, swiglu
from mcore_rl.megatron.cpu.kernels.experts import add_rows, gather_rows, grouped_linear
from mcore_rl.megatron.cpu.kernels.norm import rms_norm
from mcore_rl.megatron.cpu.kernels.rotary import rotate
from mcore_rl.megatron.cpu.kernels.swiglu import weighted_swiglu
from tests.distributed.built import build, run_without
from tests.distributed.launch import launch
from tests.tiny_models import tiny_fields

cpu.install()
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU backend is a no-op with CUDA")

FUSIONS = ["fused_rotary", "fused_swiglu", "fused_permute", "grouped_experts"]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _agree(
    ours: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> None:
    """Compare results and gradients: float64 to the last digits, float32 within its rounding."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        expected_inputs = [x.clone().requires_grad_() for x in inputs]
        expected = reference(*expected_inputs)
        weights = _random(*expected.shape, seed=9)
        found_inputs = [x.to(dtype).requires_grad_() for x in inputs]
        found = ours(*found_inputs)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        gradients = torch.autograd.grad((found * weights.to(dtype)).sum(), found_inputs)
        references = torch.autograd.grad((expected * weights).sum(), expected_inputs)
        for gradient, wanted in zip(gradients, references, strict=True):
            torch.testing.assert_close(gradient.double(), wanted, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("shape", [(7, 1, 24), (5, 2, 3, 8), (1, 5)])
def test_rms_norm_matches_torch(shape: tuple[int, ...]) -> None:
    _agree(
        lambda x, w: rms_norm(x, w, 1e-6),
        lambda x, w: F.rms_norm(x, (shape[-1],), w, 1e-6),
        [_random(*shape), _random(shape[-1], seed=1)],
    )


def test_rms_norm_of_a_slice_matches_torch() -> None:
    wide = _random(6, 3, 16)
    _agree(
        lambda x, w: rms_norm(x[:, 1:, 4:12], w, 1e-6),
        lambda x, w: F.rms_norm(x[:, 1:, 4:12], (8,), w, 1e-6),
        [wide, _random(8, seed=1)],
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_kernels_keep_non_finite_values_in_their_rows(bad: float) -> None:
    """Kernels compiled with full fastmath may assume that such values do not occur."""
    x = _random(4, 8).float()
    x[2, 3] = bad
    normed = rms_norm(x, torch.ones(8), 1e-6)
    gated = weighted_swiglu(x, torch.ones(4))
    for result in (normed, gated):
        assert torch.isfinite(result).all(1).tolist() == [True, True, False, True]
    grad = torch.ones(4, 8)
    grad[1, 0] = bad
    leaf = _random(4, 8).float().requires_grad_()
    rms_norm(leaf, torch.ones(8), 1e-6).backward(grad)
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("rotated", [16, 8])
def test_rotate_changes_leading_dimensions_of_every_head(rotated: int) -> None:
    positions = torch.tensor([0, 1, 2, 0, 1, 0, 5])
    angles = _random(6, rotated // 2, seed=2).repeat(1, 2)

    def reference(t: torch.Tensor) -> torch.Tensor:
        cos, sin = (function(angles)[positions][:, None] for function in (torch.cos, torch.sin))
        first, second = t[..., :rotated].chunk(2, -1)
        turned = t[..., :rotated] * cos + torch.cat((-second, first), -1) * sin
        return torch.cat((turned, t[..., rotated:]), -1)

    _agree(
        lambda t: rotate(t, torch.cos(angles).to(t.dtype), torch.sin(angles).to(t.dtype), positions),
        reference,
        [_random(7, 3, 16)],
    )


def _rotate_packed(_: int, latent: bool) -> list[Any]:
    """Call Megatron's function on two packed sequences. Returns its result and the gradient of its input."""
    from megatron.core.models.common.embeddings import rope_utils

    t = _random(9, 3, 8).float().requires_grad_()
    freqs = _random(5, 4, seed=2).float().repeat(1, 2)[:, None, None]
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    options = {"multi_latent_attention": latent, "mscale": 1.3, "cp_group": dist.group.WORLD}
    out = rope_utils._apply_rotary_pos_emb_thd(t, offsets, freqs, **options)
    out.backward(_random(9, 3, 8, seed=3).float())
    return [out.detach().numpy(), t.grad.numpy()]


@pytest.mark.parametrize("latent", [False, True])
def test_rotate_packed_equals_megatron(latent: bool) -> None:
    """Latent attention pairs adjacent dimensions, other attention pairs halves."""
    (ours,), (theirs,) = (launch(run_without, 1, fixes, _rotate_packed, latent) for fixes in ([], ["fused_rotary"]))
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(reference), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 37])
def test_weighted_swiglu_over_several_blocks_matches_torch(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swiglu, "_BLOCK_ELEMENTS", 40)
    _agree(
        weighted_swiglu,
        lambda x, w: F.silu(x[:, :6]) * x[:, 6:] * w[:, None],
        [_random(rows, 12), _random(rows, seed=1)],
    )


def test_gather_rows_and_add_rows_are_transposes() -> None:
    index = torch.tensor([4, 0, 0, 2, 4, 4])  # rows 1 and 3 are not gathered
    _agree(lambda x: gather_rows(x, index), lambda x: x[index], [_random(5, 2, 3)])
    _agree(lambda x: add_rows(x, index, 5), lambda x: x.new_zeros(5, 2, 3).index_add(0, index, x), [_random(6, 2, 3)])


def test_grouped_linear_with_unused_expert_matches_torch() -> None:
    rows = [3, 0, 4]
    _agree(
        lambda x, *weights: grouped_linear(x, weights, rows),
        lambda x, *weights: torch.cat([part @ w.t() for part, w in zip(x.split(rows), weights, strict=True)]),
        [_random(7, 5), *(_random(4, 5, seed=1 + i) for i in range(3))],
    )


ROWS, WIDTH = 37, 24
POSITIONS = (torch.arange(ROWS) % 9).numpy()


@pytest.mark.parametrize(
    ("kernel", "shapes"),
    [
        (lambda x, w, out, s: norm._forward(x, w, 1e-6, out, s), [(ROWS, WIDTH), WIDTH, (ROWS, WIDTH), ROWS]),
        (norm._backward, [(ROWS, WIDTH), (ROWS, WIDTH), WIDTH, ROWS, (ROWS, WIDTH), WIDTH]),
        (swiglu._forward, [(ROWS, 2 * WIDTH), (ROWS, WIDTH), ROWS, (ROWS, WIDTH)]),
        (
            swiglu._backward,
            [(ROWS, WIDTH), (ROWS, 2 * WIDTH), (ROWS, WIDTH), ROWS, (ROWS, 2 * WIDTH), ROWS],
        ),
        (
            lambda t, c, s, out: rotary._rotate(t, c, s, POSITIONS, out),
            [(ROWS, 2, WIDTH), (9, WIDTH), (9, WIDTH), (ROWS, 2, WIDTH)],
        ),
        (lambda x, out: experts._add(x, POSITIONS, out), [(ROWS, WIDTH), (9, WIDTH)]),
    ],
)
def test_kernels_are_bitwise_independent_of_memory_addresses(kernel: Callable[..., None], shapes: list[Any]) -> None:
    """A resumed run must compute the same bits. Compiled loops choose their code by possible overlaps of arrays, so the
    arrays are adjacent in every order here."""
    sizes = [(shape,) if isinstance(shape, int) else shape for shape in shapes]
    values = [_random(*size, seed=i).float() for i, size in enumerate(sizes)]
    first: list[torch.Tensor] | None = None
    for order in itertools.islice(itertools.permutations(range(len(values))), 0, None, max(len(values) - 3, 1) ** 2):
        arena, offset, placed = torch.empty(sum(value.numel() for value in values)), 0, {}
        for index in order:
            end = offset + values[index].numel()
            placed[index] = arena[offset:end].view(values[index].shape).copy_(values[index])
            offset = end
        kernel(*(placed[index].numpy() for index in range(len(values))))
        found = [placed[index].clone() for index in range(len(values))]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True)), order


# ---- in megatron's model ----


def _train(_: int, ep: int, dtype: str = "float32", listened: bool = False) -> tuple[set[str], dict[str, Any]]:
    """Return the names of the autograd functions in a pass over two sequences, and output and gradients."""
    from mcore_rl.megatron.model.attention.packed import pack_sequences

    hf_config = tiny_fields("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[1])
    (chunk,), _ = build(hf_config, {"ep": ep}, dtype=dtype, random_init=True)
    if listened:
        chunk.decoder.layers[0].mlp.experts.local_experts[0].register_forward_hook(lambda *_: None)
    tokens = torch.arange(19) % 96
    hidden = chunk(tokens[None], None, None, packed_seq_params=pack_sequences([12, 7]))
    functions = _functions(hidden.grad_fn)
    hidden.float().square().mean().backward()
    values = {name: p.grad.float().numpy() for name, p in chunk.named_parameters() if p.grad is not None}
    return functions, {"hidden": hidden.detach().float().numpy(), **values}


def _functions(root: Any) -> set[str]:
    names, pending, seen = set(), [root], {root}
    while pending:
        node = pending.pop()
        names.add(node.name())
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)
    return names


FUNCTION_OF = {
    "fused_rotary": {"_RotaryBackward"},
    "fused_swiglu": {"_WeightedSwiGLUBackward"},
    "fused_permute": {"_GatherRowsBackward", "_AddRowsBackward"},
    "grouped_experts": {"_GroupedLinearBackward"},
}


@pytest.mark.parametrize("ep", [1, 2])
def test_model_with_and_without_each_kernel_is_equal(ep: int) -> None:
    everything = {"_RMSNormBackward"}.union(*FUNCTION_OF.values())
    whole = launch(_train, ep, ep)
    assert all(everything <= functions for functions, _ in whole)
    for skipped in ([name] for name in FUSIONS):
        others = launch(run_without, ep, skipped, _train, ep)
        for (_, found), (functions, expected) in zip(whole, others, strict=True):
            absent = everything - functions
            # The dense layer's SwiGLU and the experts' are one function.
            assert absent == (set() if skipped == ["fused_swiglu"] else FUNCTION_OF[skipped[0]])
            assert found.keys() == expected.keys()
            for name, value in found.items():
                torch.testing.assert_close(
                    torch.from_numpy(value), torch.from_numpy(expected[name]), rtol=1e-4, atol=1e-6, msg=name
                )


def test_experts_with_hooks_are_called_one_by_one() -> None:
    """Adapters and parameter gathering use hooks of the modules, which the grouped product does not call."""
    ((functions, found),) = launch(_train, 1, 1, "float32", True)
    ((_, expected),) = launch(_train, 1, 1)
    assert "_GroupedLinearBackward" not in functions
    for name, value in expected.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), torch.from_numpy(value), rtol=1e-4, atol=1e-6)


def test_model_in_bfloat16_uses_megatron_functions() -> None:
    ((functions, found),) = launch(_train, 1, 1, "bfloat16")
    assert not functions & {"_RMSNormBackward"}.union(*FUNCTION_OF.values())
    assert all(torch.isfinite(torch.from_numpy(value)).all() for value in found.values())
