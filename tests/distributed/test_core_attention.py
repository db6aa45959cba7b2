"""Packed core attention compared with float64 softmax attention, sequence by sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mcore_rl.megatron.model.attention import packed as attention

HEADS, GROUPS, WIDTH = 4, 2, 16
# Shared batches, a batch of one, lengths next to the limit, and equal lengths that are not adjacent.
LENGTHS = [3, 130, 128, 40, 1, 127, 33, 300, 40, 41, 129, 3]


WINDOWS = [1, 5, 130, 600]  # alone, inside a batch, between the lengths, and longer than a block of the kernel


def _attention(window: int | None = None) -> attention.SDPACoreAttention:
    config = SimpleNamespace(
        context_parallel_size=1,
        attention_dropout=0.0,
        window_size=window and (window - 1, 0),
        window_attn_skip_freq=None,
        softmax_type="vanilla",
    )
    return attention.SDPACoreAttention(config, 1, attention.AttnMaskType.causal, "self")


def _inputs(num_tokens: int, value_width: int = WIDTH) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(num_tokens, HEADS, WIDTH), (num_tokens, GROUPS, WIDTH), (num_tokens, GROUPS, value_width)]
    return tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)


def _written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    outputs = []
    for a, b, c in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        b, c = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (b, c))
        scores = torch.einsum("qhd,khd->hqk", a, b) / WIDTH**0.5
        ones = torch.ones(len(a), len(a), dtype=torch.bool)
        hidden = ones.triu(1) if window is None else ones.triu(1) | ones.tril(-window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(a), 1)), -1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(a)], c))
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


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, *WINDOWS])
def test_block_attention_with_windows_and_sinks_equals_softmax(window: int | None, sinks: bool) -> None:
    lengths = [*LENGTHS, 700]
    inputs = list(_inputs(sum(lengths)))
    core = _attention(window)
    if sinks:
        # One sink dominates the softmax, and one is negligible.
        core.softmax_offset = torch.nn.Parameter(torch.tensor([0.3, 6.0, -1.0, -30.0]))
        inputs.append(core.softmax_offset)
    weights = torch.randn(sum(lengths), HEADS * WIDTH, generator=torch.Generator().manual_seed(6))
    ours = core(*inputs[:3], packed_seq_params=attention.pack_sequences(lengths))
    theirs = _written_out(*inputs[:3], lengths, window, inputs[3] if sinks else None)
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-6)
    found = torch.autograd.grad((ours * weights).sum(), inputs)
    expected = torch.autograd.grad((theirs * weights).sum(), inputs)
    for mine, reference in zip(found, expected, strict=True):
        # Sums of at most 700 terms per key, and of 1,544 tokens per sink.
        torch.testing.assert_close(mine, reference, rtol=2e-6, atol=1e-5)


def test_block_attention_saves_memory_in_proportion_to_tokens() -> None:
    """The scores of all pairs of one head alone would have 64 times the elements that are allowed here."""
    length, window = 4096, 64
    inputs = _inputs(length)
    core = _attention(window)
    saved: set[tuple[int, int]] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.add((tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes() // 4))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        core(*inputs, packed_seq_params=attention.pack_sequences([length]))
    q = length * HEADS * WIDTH
    assert (
        sum(elements for _, elements in saved) == 3 * q + length * HEADS
    )  # q, k and v (half of q each), out, log-sums


def test_core_attention_window_applies_to_the_layers_of_the_pattern() -> None:
    config = SimpleNamespace(
        context_parallel_size=1,
        attention_dropout=0.0,
        window_size=(7, 0),
        window_attn_skip_freq=[1, 0],
        softmax_type="vanilla",
    )
    cores = [attention.SDPACoreAttention(config, n, attention.AttnMaskType.causal, "self") for n in (1, 2)]
    assert [core.window for core in cores] == [8, None]


@pytest.mark.parametrize("window", [None, 5, 130])
def test_sdpa_attention_is_bitwise_independent_of_sequence_order(window: int | None) -> None:
    """Micro-batches change with the layout; a resumed run must compute the same bits."""
    inputs = [x.detach() for x in _inputs(sum(LENGTHS))]
    core = _attention(window)
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
