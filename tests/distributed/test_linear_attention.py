"""The gated delta rule and the causal convolution of packed rows, compared with transformers on each sequence alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mcore_rl.megatron.model.linear_attention.chunks import causal_convolution
from mcore_rl.megatron.model.linear_attention.delta_rule import gated_delta_rule

HEADS, KEY, VALUE = 3, 8, 12
# One token, one less and one more than a chunk, several chunks, and equal lengths.
LENGTHS = [(1,), (17, 1, 130, 64, 63, 65, 5, 130), (3, 3, 3)]


def _inputs(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Unit queries and keys, values, logarithms of decays down to exp(-4), and strengths in [0, 1]."""
    generator = torch.Generator().manual_seed(sum(lengths))
    wide = [torch.randn(sum(lengths), HEADS, size, generator=generator) for size in (KEY, KEY, VALUE)]
    decay, strength = torch.rand(2, sum(lengths), HEADS, generator=generator)
    parts = [F.normalize(wide[0], dim=-1), F.normalize(wide[1], dim=-1), wide[2], -4 * decay, strength]
    return [part.requires_grad_() for part in parts]


def _apply(parts: list[torch.Tensor], lengths: tuple[int, ...]) -> torch.Tensor:
    query, key, value, decay, strength = parts
    return gated_delta_rule(query, key, value, decay, strength, lengths)


def _token_by_token(parts: list[torch.Tensor], lengths: tuple[int, ...]) -> torch.Tensor:
    from transformers.models.qwen3_next import modeling_qwen3_next

    outputs = []
    for sequence in zip(*(part.split(lengths) for part in parts), strict=True):
        query, key, value, decay, strength = (part[None] for part in sequence)
        output, _ = modeling_qwen3_next.torch_recurrent_gated_delta_rule(
            query, key, value, g=decay, beta=strength, initial_state=None, output_final_state=False
        )
        outputs.append(output[0])
    return torch.cat(outputs)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_delta_rule_of_packed_row_equals_single_sequences(lengths: tuple[int, ...]) -> None:
    """Transformers' recurrence computes token by token, so it shares no chunks with ours. Tolerance: float32 rounding
    of triangular systems, relative to the largest gradient."""
    parts = _inputs(lengths)
    ours, theirs = _apply(parts, lengths), _token_by_token(parts, lengths)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    found, expected = (torch.autograd.grad((output * weights).sum(), parts) for output in (ours, theirs))
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=2e-5 * float(reference.abs().max()))


def test_delta_rule_is_bitwise_independent_of_sequence_order() -> None:
    """Micro-batches change with the layout; a resumed run must compute the same bits."""
    lengths = LENGTHS[1]
    parts = [part.detach() for part in _inputs(lengths)]
    once = _apply(parts, lengths)
    backwards = [torch.cat(part.split(lengths)[::-1]) for part in parts]
    again = _apply(backwards, lengths[::-1])
    assert torch.equal(torch.cat(again.split(lengths[::-1])[::-1]), once)


def test_delta_rule_after_inference_mode_has_gradients() -> None:
    """The arrangement is cached, and inference tensors in it could not be saved for a backward pass."""
    lengths = (9, 4)
    with torch.inference_mode():
        _apply(_inputs(lengths), lengths)
    _apply(_inputs(lengths), lengths).sum().backward()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_convolution_of_packed_row_equals_single_sequences(lengths: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    row = torch.randn(sum(lengths), 6, generator=generator).requires_grad_()
    weight = torch.randn(6, 1, 4, generator=generator).requires_grad_()
    ours = causal_convolution(row, weight, lengths)
    theirs = torch.cat([F.conv1d(F.pad(x.T, (3, 0)), weight, groups=6).T for x in row.split(lengths)])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    found, expected = (torch.autograd.grad(output.square().sum(), (row, weight)) for output in (ours, theirs))
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)
