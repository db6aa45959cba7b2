"""Packed core attention compared with float64 softmax attention, sequence by sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mcore_rl.megatron.model import attention

HEADS, GROUPS, WIDTH = 4, 2, 16
# Shared batches, a batch of one, lengths next to the limit, and equal lengths that are not adjacent.
LENGTHS = [3, 130, 128, 40, 1, 127, 33, 300, 40, 41, 129, 3]


def _attention(context_parallel_size: int = 1) -> attention.SDPACoreAttention:
    config = SimpleNamespace(context_parallel_size=context_parallel_size, attention_dropout=0.0)
    return attention.SDPACoreAttention(config, 1, attention.AttnMaskType.causal, "self")


def _inputs(num_tokens: int, value_width: int = WIDTH) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(num_tokens, HEADS, WIDTH), (num_tokens, GROUPS, WIDTH), (num_tokens, GROUPS, value_width)]
    return tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)


def _written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    outputs = []
    for a, b, c in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        b, c = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (b, c))
        scores = torch.einsum("qhd,khd->hqk", a, b) / WIDTH**0.5
        future = torch.ones(len(a), len(a), dtype=torch.bool).triu(1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), c))
    return torch.cat(outputs).flatten(1)


# The first two are adjacent and need no copy.
@pytest.mark.parametrize("value_width", [WIDTH, 12], ids=["", "narrow values"])
@pytest.mark.parametrize("lengths", [[7] * 5, [140, 9, 9, 9, 2], LENGTHS])
def test_sdpa_attention_packed_equals_separate_sequences(lengths: list[int], value_width: int) -> None:
    """Narrow values: heads of latent attention are wider in queries and keys than in values."""
    inputs = _inputs(sum(lengths), value_width)
    weights = torch.randn(sum(lengths), HEADS * value_width, generator=torch.Generator().manual_seed(6))
    ours = _attention()(*inputs, packed_seq_params=attention.pack_sequences(lengths))
    theirs = _written_out(*inputs, lengths)
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-6)
    found = torch.autograd.grad((ours * weights).sum(), inputs)
    expected = torch.autograd.grad((theirs * weights).sum(), inputs)
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=5e-6)


def test_sdpa_attention_is_bitwise_independent_of_sequence_order() -> None:
    """Micro-batches change with the layout; a resumed run must compute the same bits."""
    inputs = [x.detach() for x in _inputs(sum(LENGTHS))]
    core = _attention()
    once = core(*inputs, packed_seq_params=attention.pack_sequences(LENGTHS))
    assert torch.equal(once, core(*inputs, packed_seq_params=attention.pack_sequences(LENGTHS)))
    reversed_inputs = [torch.cat(x.split(LENGTHS)[::-1]) for x in inputs]
    again = core(*reversed_inputs, packed_seq_params=attention.pack_sequences(LENGTHS[::-1]))
    assert torch.equal(torch.cat(again.split(LENGTHS[::-1])[::-1]), once)


def test_sdpa_attention_plan_from_inference_mode_is_usable() -> None:
    """The plan is cached. Inference tensors in it could not be saved for a later backward pass."""
    lengths = [4, 6, 11]
    inputs = _inputs(sum(lengths))
    with torch.inference_mode():
        _attention()(*inputs, packed_seq_params=attention.pack_sequences(lengths))
    _attention()(*inputs, packed_seq_params=attention.pack_sequences(lengths)).sum().backward()
