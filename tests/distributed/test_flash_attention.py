"""This project's calls of torch's flash attention for GPUs, with stand-ins for its kernels, compared in float64 with
the attention of transformers' gpt-oss. tests/gpu/test_attention.py has the real kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from mcore_rl.doctor.kernels import KERNELS, call_each
from mcore_rl.megatron.model.attention import flash, packed
from mcore_rl.megatron.model.attention.context import SINGLE_RANK, ContextPart
from mcore_rl.megatron.model.attention.flash import flash_attention
from tests.distributed import flash_kernel
from tests.distributed.sink_reference import LENGTHS, attention, gradients, loss_weights, row

WIDTH = 16


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    library = flash_kernel.install()
    yield
    library._destroy()


@pytest.mark.parametrize("window", [None, 1, 128, 400])
def test_flash_attention_with_sinks_equals_transformers(window: int | None) -> None:
    inputs = row(WIDTH)
    ours = flash_attention(*inputs[:3], LENGTHS, SINGLE_RANK, window=window, sinks=inputs[3])
    theirs = attention(*inputs, window)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
    torch.testing.assert_close(gradients(ours, inputs), gradients(theirs, inputs), rtol=1e-12, atol=1e-12)


def test_flash_attention_pads_heads_that_the_kernel_rejects() -> None:
    """Latent attention has narrower values; the kernel requires equal widths and multiples of 8."""
    q, k, v, _ = row(WIDTH, 12)
    found = flash_attention(q, k, v, LENGTHS, SINGLE_RANK, window=5)
    wide = flash_attention(q, k, torch.nn.functional.pad(v, (0, 4)), LENGTHS, SINGLE_RANK, window=5)
    torch.testing.assert_close(found, wide[..., :12], rtol=0, atol=0)
    narrow = flash_attention(q[..., :6], k[..., :6], v, LENGTHS, SINGLE_RANK, scale=0.5)
    small = (x.detach()[..., :6] for x in (q, k))
    expected = packed.packed_attention(*small, torch.nn.functional.pad(v, (0, 0)), LENGTHS, scale=0.5)
    torch.testing.assert_close(narrow, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (128, False), (None, True), (128, True)])
def test_core_attention_on_gpus_uses_flash_where_sdpa_cannot(
    window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the CPU; without windows and sinks, torch's SDPA computes the row on GPUs too."""
    config = SimpleNamespace(
        context_parallel_size=1,
        attention_dropout=0.0,
        window_size=window and (window - 1, 0),
        window_attn_skip_freq=None,
        softmax_type="vanilla",
    )
    core = packed.SDPACoreAttention(config, 1, packed.AttnMaskType.causal, "self")
    *inputs, offsets = (x.detach().float() for x in row(WIDTH))
    if sinks:
        core.softmax_offset = torch.nn.Parameter(offsets)
    lengths = packed.pack_sequences(list(LENGTHS))
    expected = core(*inputs, packed_seq_params=lengths)
    calls = []

    def counted(*args: object, **options: object) -> torch.Tensor:
        calls.append(options)
        return flash_attention(*args, **options)

    monkeypatch.setattr(packed, "on_gpu", lambda query: True)
    monkeypatch.setattr(packed, "flash_attention", counted)
    found = core(*inputs, packed_seq_params=lengths)
    assert len(calls) == (window is not None or sinks)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 1, 40])
def test_flash_attention_parts_of_eight_ranks_equal_whole_rows(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process: the rows of all ranks are known, and the gradients of keys are added up here.
    test_context_parallel has real ranks."""
    lengths, size = (16, 48, 128, 16, 32), 8
    tokens = sum(lengths)
    *inputs, sinks = (x.detach()[:tokens].requires_grad_() for x in row(WIDTH))
    whole = flash_attention(*inputs, lengths, SINGLE_RANK, window=window, sinks=sinks)
    expected = gradients(whole, [*inputs, sinks])
    weights = loss_weights(whole)
    parts = [ContextPart(rank, size) for rank in range(size)]
    held = [part.row_indices(torch.tensor(lengths)) for part in parts]
    order = torch.cat(held)
    of_keys: list[torch.Tensor] = []

    def reduce(summand: torch.Tensor, part: ContextPart) -> torch.Tensor:
        of_keys.append(summand)
        return summand.unflatten(1, (size, -1))[:, part.rank]

    monkeypatch.setattr(flash, "gather_rows", lambda *_: torch.stack(inputs[1:])[:, order].detach())
    monkeypatch.setattr(flash, "reduce_scatter_rows", reduce)
    of_queries, of_sinks = torch.empty_like(inputs[0]), torch.zeros_like(sinks)
    for part, mine in zip(parts, held, strict=True):
        rows = [x.detach()[mine].requires_grad_() for x in inputs]
        leaf = sinks.detach().requires_grad_()
        out = flash_attention(*rows, lengths, part, window=window, sinks=leaf)
        torch.testing.assert_close(out, whole[mine], rtol=0, atol=1e-13)
        of_queries[mine], _, _, summand = torch.autograd.grad((out * weights[mine]).sum(), [*rows, leaf])
        of_sinks += summand
    found = torch.empty(2, *inputs[1].shape, dtype=torch.float64)
    found[:, order] = torch.stack(of_keys).sum(0)
    torch.testing.assert_close((of_queries, *found, of_sinks), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 128])
def test_flash_attention_calls_the_kernels_like_torch(window: int | None) -> None:
    """varlen_attn is torch's public function for these kernels."""
    inputs = row(WIDTH)[:3]
    offsets = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    left = -1 if window is None else window - 1
    longest = max(LENGTHS)
    theirs = varlen_attn(*inputs, offsets, offsets, longest, longest, window_size=(left, 0), enable_gqa=True)
    ours = flash_attention(*inputs, LENGTHS, SINGLE_RANK, window=window)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(gradients(ours, inputs), gradients(theirs, inputs), rtol=0, atol=0)


def test_doctor_calls_the_flash_kernels_with_valid_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    name = "torch's flash, with a window"
    call_each(KERNELS, "cpu", [name])
    assert json.loads(capsys.readouterr().out) == {"kernel": name, "error": ""}


def test_flash_kernel_stand_ins_have_the_shapes_of_torch() -> None:
    """The shapes and dtypes that torch states for its CUDA kernel, whose log-sum-exps are float32 [heads, T]."""
    q, k, v, _ = (x.detach().bfloat16() for x in row(WIDTH))
    offsets = torch.tensor([0, 100, len(q)], dtype=torch.int32)
    longest = len(q) - 100
    options = {"scale": 0.25, "window_size_left": 9, "window_size_right": 0}

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, offsets = tensors
        out, log_sum, *state = torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, longest, longest, 0.0, False, False, **options
        )
        gradients = torch.ops.aten._flash_attention_backward(
            out, q, k, v, out, log_sum, offsets, offsets, longest, longest, 0.0, False, *state[:2], **options
        )
        return out, log_sum, *gradients

    ours = call(q, k, v, offsets)
    theirs = call(*(x.to("meta") for x in (q, k, v, offsets)))
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in theirs]
