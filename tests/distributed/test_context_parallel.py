"""Context parallelism: division of packed rows, attention, and communication between ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mcore_rl.megatron.model.attention import packed as attention
from mcore_rl.megatron.model.attention.context import ContextPart, attention_blocks, context_attention
from mcore_rl.megatron.model.attention.flash import flash_attention
from tests.distributed import flash_kernel
from tests.distributed.launch import launch

HEADS, GROUPS, WIDTH = 4, 2, 16
# Several sequences of equal length, not adjacent; the shortest possible; chunks of one token.
LENGTHS = [16, 48, 8, 16, 8, 128, 32]
SHAPES = {"grouped": (GROUPS, WIDTH, WIDTH), "latent": (HEADS, WIDTH, 12), "wide values": (GROUPS, 8, 20)}
# Within a chunk, over several chunks, and longer than most sequences.
VARIANTS: dict[str, tuple[int | None, bool]] = {
    "plain": (None, False),
    "sinks": (None, True),
    "window of 3": (3, False),
    "window of 3, sinks": (3, True),
    "window of 40, sinks": (40, True),
}


def test_context_part_matches_documented_example() -> None:
    lengths = torch.tensor([8, 4])
    assert ContextPart(0, 2).row_indices(lengths).tolist() == [0, 1, 6, 7, 8, 11]
    assert ContextPart(1, 2).row_indices(lengths).tolist() == [2, 3, 4, 5, 9, 10]
    assert ContextPart(1, 2).positions(lengths).tolist() == [2, 3, 4, 5, 1, 2]
    assert ContextPart(1, 2).owners(lengths).tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_part_assigns_every_token_to_one_rank(size: int) -> None:
    lengths = torch.tensor([8, 24, 16])
    owners = ContextPart(0, size).owners(lengths)
    for rank in range(size):
        part = ContextPart(rank, size)
        assert part.row_indices(lengths).tolist() == (owners == rank).nonzero().flatten().tolist()
    if size == 1:
        odd = torch.tensor([5, 1, 3])
        assert ContextPart().positions(odd).tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2]
        assert ContextPart().owners(odd).tolist() == [0] * 9


@pytest.mark.parametrize("window", [None, 1, 2, 7])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_attention_blocks_cover_causal_pairs_once_and_equally(size: int, window: int | None) -> None:
    """Each visible pair of query and key is computed once, on the rank of its query; without a window every rank has
    the same work."""
    chunk = 3
    length = 2 * size * chunk
    seen = np.zeros((length, length), int)
    work = []
    for rank in range(size):
        part = ContextPart(rank, size)
        indices = part.row_indices(torch.tensor([length])).numpy()
        work.append(0)
        for block in attention_blocks(part, chunk, window):
            queries = indices[block.queries]
            for keys in block.parts:
                positions = np.arange(length)[keys.keys]
                pairs = np.ones((len(queries), len(positions)), int)
                if keys.causal:
                    pairs = np.tril(pairs)
                if keys.window is not None:
                    assert queries[-1] == positions[-1]
                    pairs *= (positions <= queries[:, None]) & (positions > queries[:, None] - keys.window)
                seen[np.ix_(queries, positions)] += pairs
                work[-1] += pairs.sum()
    assert np.array_equal(seen, np.tril(np.triu(np.ones_like(seen), -length if window is None else 1 - window)))
    if window is None:
        assert work == [length * (length + 1) // 2 // size] * size


def _inputs(num_tokens: int, groups: int, width: int, value_width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(num_tokens, HEADS, width), (num_tokens, groups, width), (num_tokens, groups, value_width)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _weights(num_tokens: int, value_width: int) -> torch.Tensor:
    return torch.randn(num_tokens, HEADS, value_width, generator=torch.Generator().manual_seed(6))


def _written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    outputs = []
    for a, b, c in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        b, c = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (b, c))
        scores = torch.einsum("qhd,khd->hqk", a, b) / a.shape[-1] ** 0.5
        ones = torch.ones(len(a), len(a), dtype=torch.bool)
        hidden = ones.triu(1) if window is None else ones.triu(1) | ones.tril(-window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(a), 1)), -1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(a)], c))
    return torch.cat(outputs)


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    return request.param, launch(_worker, request.param)


def _worker(rank: int) -> dict[str, Any]:
    part = ContextPart(rank, dist.get_world_size(), dist.group.WORLD)
    return {
        "attention": {name: _attend(part, shape, torch.float32) for name, shape in SHAPES.items()},
        "bfloat16": _attend(part, SHAPES["grouped"], torch.bfloat16),
        **_variants(part),
        "gathered": _gather(part),
        "rolled": _roll(part),
        "rotated": _rotate(part),
    }


def _core(part: ContextPart) -> attention.SDPACoreAttention:
    config = SimpleNamespace(
        context_parallel_size=part.size, attention_dropout=0.0, window_size=None, softmax_type="vanilla"
    )
    config.window_attn_skip_freq = None
    groups = SimpleNamespace(cp=part.group)
    return attention.SDPACoreAttention(config, 1, attention.AttnMaskType.causal, "self", pg_collection=groups)


def _attend(part: ContextPart, shape: tuple[int, int, int], dtype: torch.dtype) -> list[np.ndarray]:
    indices = part.row_indices(torch.tensor(LENGTHS))
    inputs = [x[indices].to(dtype).requires_grad_() for x in _inputs(sum(LENGTHS), *shape)]
    packed = attention.pack_sequences(LENGTHS, context_parallel=True)
    out = _core(part)(*inputs, packed_seq_params=packed)
    weights = _weights(sum(LENGTHS), shape[2])[indices].flatten(1).to(dtype)
    gradients = torch.autograd.grad((out * weights).sum(), inputs)
    return [x.detach().float().numpy() for x in (out.unflatten(1, (HEADS, -1)), *gradients)]


SINKS = torch.tensor([0.3, 6.0, -1.0, -30.0])


def _variants(part: ContextPart) -> dict[str, dict[str, list[np.ndarray]]]:
    """Results with the kernels of CPUs, and with those of GPUs, for which there are stand-ins."""
    library = flash_kernel.install()
    found = {
        kernel: {name: _attend_variant(part, attend, *variant) for name, variant in VARIANTS.items()}
        for kernel, attend in (("blocks", context_attention), ("flash", flash_attention))
    }
    library._destroy()
    return found


def _attend_variant(
    part: ContextPart, attend: Callable[..., torch.Tensor], window: int | None, sinks: bool
) -> list[np.ndarray]:
    indices = part.row_indices(torch.tensor(LENGTHS))
    inputs = [x[indices].requires_grad_() for x in _inputs(sum(LENGTHS), *SHAPES["grouped"])]
    offsets = SINKS.clone().requires_grad_() if sinks else None
    out = attend(*inputs, tuple(LENGTHS), part, window=window, sinks=offsets)
    total = (out * _weights(sum(LENGTHS), WIDTH)[indices]).sum()
    gradients = torch.autograd.grad(total, [*inputs, *([] if offsets is None else [offsets])])
    return [x.detach().numpy() for x in (out, *gradients)]


def _expected(shape: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    inputs = [x.to(dtype).double().requires_grad_() for x in _inputs(sum(LENGTHS), *shape)]
    out = _written_out(*inputs, LENGTHS)
    weights = _weights(sum(LENGTHS), shape[2]).to(dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.parametrize("shape", SHAPES)
def test_context_attention_equals_attention_of_whole_sequences(shape: str, found: Any) -> None:
    size, ranks = found
    expected = _expected(SHAPES[shape], torch.float32)
    for rank, results in enumerate(ranks):
        indices = ContextPart(rank, size).row_indices(torch.tensor(LENGTHS))
        for ours, theirs in zip(results["attention"][shape], expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(ours).double(), theirs[indices], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", ["blocks", "flash"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_context_attention_variants_equal_whole_sequences(variant: str, kernel: str, found: Any) -> None:
    """The gradient of the sinks is a sum over the ranks."""
    size, ranks = found
    window, has_sinks = VARIANTS[variant]
    inputs = [x.double().requires_grad_() for x in _inputs(sum(LENGTHS), *SHAPES["grouped"])]
    sinks = SINKS.double().requires_grad_() if has_sinks else None
    out = _written_out(*inputs, LENGTHS, window, sinks)
    leaves = [*inputs, *([] if sinks is None else [sinks])]
    gradients = torch.autograd.grad((out * _weights(sum(LENGTHS), WIDTH)).sum(), leaves)
    expected = [out.detach(), *gradients[:3]]
    for rank, results in enumerate(ranks):
        indices = ContextPart(rank, size).row_indices(torch.tensor(LENGTHS))
        for ours, theirs in zip(results[kernel][variant], expected, strict=False):
            torch.testing.assert_close(torch.from_numpy(ours).double(), theirs[indices], rtol=0, atol=1e-5)
    if sinks is not None:
        summed = torch.from_numpy(sum(results[kernel][variant][-1] for results in ranks)).double()
        torch.testing.assert_close(summed, gradients[3], rtol=1e-5, atol=1e-5)


def test_context_attention_in_bfloat16_is_as_accurate_as_bfloat16(found: Any) -> None:
    size, ranks = found
    expected = _expected(SHAPES["grouped"], torch.bfloat16)
    for rank, results in enumerate(ranks):
        indices = ContextPart(rank, size).row_indices(torch.tensor(LENGTHS))
        for ours, theirs in zip(results["bfloat16"], expected, strict=True):
            error = (torch.from_numpy(ours).double() - theirs[indices]).abs().max() / theirs.abs().max()
            assert error < 0.01  # 2^-8 per rounding, a few roundings


OWNERS = [1, 0, 0, 1, 1, 1, 0, 1]  # with more than two ranks the other ranks have no tokens


def _gather(part: ContextPart) -> list[np.ndarray]:
    owners = torch.tensor(OWNERS)
    mine = torch.arange(16.0).view(2, 8)[:, owners == part.rank].requires_grad_()
    whole = part.gather(mine, owners)
    # Each rank computes a loss of its own tokens that depends on all tokens.
    loss = (whole[0].sum() * whole[1] * (1 + part.rank)).mul(owners == part.rank).sum()
    (gradient,) = torch.autograd.grad(loss, mine)
    return [whole.detach().numpy(), gradient.numpy()]


def test_context_gather_restores_order_and_sums_gradients(found: Any) -> None:
    _, ranks = found
    owners = torch.tensor(OWNERS)
    leaf = torch.arange(16.0).view(2, 8).requires_grad_()
    (leaf[0].sum() * leaf[1] * (1 + owners)).sum().backward()
    assert leaf.grad is not None
    for rank, results in enumerate(ranks):
        whole, gradient = results["gathered"]
        assert np.array_equal(whole, leaf.detach().numpy())
        assert np.array_equal(gradient, leaf.grad[:, owners == rank].numpy())


def _roll(part: ContextPart) -> list[int]:
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    tokens = torch.arange(1, sum(LENGTHS) + 1)[part.row_indices(torch.tensor(LENGTHS))]
    packed = attention.pack_sequences(LENGTHS, context_parallel=True)
    return roll_tensor(tokens[None], shifts=-1, dims=-1, cp_group=part.group, packed_seq_params=packed)[0][0].tolist()


def test_roll_tensor_with_context_layout_shifts_by_one(found: Any) -> None:
    """Multi-token prediction reads the next token this way."""
    size, ranks = found
    row = torch.arange(1, sum(LENGTHS) + 1)
    rolled = torch.cat([torch.cat((part[1:], torch.zeros(1, dtype=torch.int64))) for part in row.split(LENGTHS)])
    for rank, results in enumerate(ranks):
        assert results["rolled"] == rolled[ContextPart(rank, size).row_indices(torch.tensor(LENGTHS))].tolist()


def _rotate(part: ContextPart) -> list[np.ndarray]:
    from megatron.core.models.common.embeddings import rope_utils

    from mcore_rl.megatron.cpu.registry import without

    indices = part.row_indices(torch.tensor(LENGTHS))
    t = torch.randn(sum(LENGTHS), 3, 8, generator=torch.Generator().manual_seed(3))[indices]
    freqs = torch.outer(torch.arange(max(LENGTHS)), torch.tensor([1.0, 0.1, 0.01])).repeat(1, 2)[:, None, None]
    offsets = attention.pack_sequences(LENGTHS, context_parallel=True).cu_seqlens_q
    ours = rope_utils._apply_rotary_pos_emb_thd(t, offsets, freqs, cp_group=part.group)
    with without("fused_rotary"):
        theirs = rope_utils._apply_rotary_pos_emb_thd(t, offsets, freqs, cp_group=part.group)
    return [ours.numpy(), theirs.numpy()]


def test_rotary_by_position_equals_megatron(found: Any) -> None:
    for results in found[1]:
        np.testing.assert_allclose(*results["rotated"], rtol=1e-5, atol=1e-6)
