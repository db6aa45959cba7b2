"""Softmax attention of packed rows on GPUs with torch's flash attention: sliding windows, attention sinks, and keys on
other context-parallel ranks.

A row consists of segments: consecutive queries of a sequence, and the keys that they see, of which the last belongs to
the last query. On one rank a segment is a sequence. With context parallelism it is one of the rank's two chunks of a
sequence (see `context`), and its keys are gathered from all ranks. One kernel call computes all segments. The kernel
knows no sinks: they are added to its result by `blocks.combine`, and its backward pass gets the output and the
log-sum-exps with sinks (formulas in `blocks`).

TransformerEngine 2.11 has no attention for these rows: it rejects sinks in packed rows (2.12 accepts them with cuDNN
9.18, without context parallelism), and its ring of context-parallel ranks rejects windows.

Source of the kernel's interface: torch 2.13, torch/nn/attention/varlen.py and
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx

from mcore_rl.megatron.model.attention.blocks import Attended, accumulation_dtype, combine, sink_gradient
from mcore_rl.megatron.model.attention.context import ContextPart, gather_rows, reduce_scatter_rows

HEAD_MULTIPLE = 8
"""The kernel requires head widths that are a multiple of this number."""


@dataclass(frozen=True)
class Segments:
    """Segments of a rank's row.

    queries, keys: offsets of the segments, int32 [segments + 1].
    longest: most queries and most keys of a segment.
    source: place of each key in the gathered rows of all ranks, int64 [keys]; None: the keys of the row itself.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    longest: tuple[int, int]
    source: torch.Tensor | None


@dataclass(frozen=True)
class FlashPlan:
    """Segments, the part of the rank that computes them, the window (None: none) and the factor of the scores."""

    segments: Segments
    part: ContextPart
    window: int | None
    scale: float

    def visible(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the segments. Shapes: [T, groups, d] -> [keys, groups, d].

        Collective: part.group.
        """
        source = self.segments.source
        if source is None:
            return key, value
        keys, values = gather_rows(torch.stack((key, value)), self.part).index_select(1, source)
        return keys, values

    def owned(
        self, of_keys: torch.Tensor, of_values: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum gradients of the segments' keys and values over segments and ranks, for this rank's `num_tokens`; the
        transpose of `visible`.

        Collective: part.group.
        """
        source, dtype = self.segments.source, of_keys.dtype
        if source is None:
            return of_keys, of_values
        given = torch.stack((of_keys, of_values)).to(accumulation_dtype(dtype))
        # A key is in at most two segments of a rank, so the order of the additions does not change their sum.
        gathered = given.new_zeros(2, self.part.size * num_tokens, *given.shape[2:]).index_add_(1, source, given)
        own_keys, own_values = reduce_scatter_rows(gathered, self.part).to(dtype)
        return own_keys, own_values


def on_gpu(query: torch.Tensor) -> bool:
    """Return whether `flash_attention` is to compute the attention of these queries."""
    return query.is_cuda


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    part: ContextPart,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal softmax attention within each sequence of a packed row, on one rank or across ranks. The kernel
    exists for bfloat16 and float16 only.

    Shapes: query [T, heads, d], key [T, groups, d], value [T, groups, e] of this rank's tokens -> [T, heads, e].
    lengths: lengths of the whole sequences, padded with context parallelism. scale None: 1 / sqrt(d). window: a query
    sees this number of keys, its own included; None: all earlier ones. sinks: see `blocks`, [heads]; their gradient is
    this rank's part.
    Collective: with several ranks all of part.group, once in the forward pass and twice in the backward pass.
    """
    width = query.shape[-1]
    plan = FlashPlan(_segments(lengths, part, window, query.device), part, window, scale or width**-0.5)
    # Zero padding changes no score and adds zeros to values, which are cut off.
    heads = -(-max(width, value.shape[-1]) // HEAD_MULTIPLE) * HEAD_MULTIPLE
    q, k, v = (F.pad(x, (0, heads - x.shape[-1])) if x.shape[-1] < heads else x for x in (query, key, value))
    out: torch.Tensor = _FlashAttention.apply(q, k, v, sinks, plan)
    return out[..., : value.shape[-1]]


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        plan: FlashPlan,
    ) -> torch.Tensor:
        """Shapes: query [T, heads, d], key and value [T, groups, d] of this rank -> [T, heads, d]."""
        out, log_sum = _attend(query, *plan.visible(key, value), plan)
        if sinks is not None:
            by_head, log_sum = combine([(out.transpose(0, 1), log_sum)], sinks)
            out = by_head.to(query.dtype).transpose(0, 1)
        # Save this rank's keys and values, not the gathered ones: the backward pass gathers again.
        ctx.save_for_backward(query, key, value, sinks, out, log_sum)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        query, key, value, sinks, out, log_sum = ctx.saved_tensors
        plan: FlashPlan = ctx.plan
        attended = Attended(query, *plan.visible(key, value), out, log_sum)
        of_query, of_keys, of_values = _gradients(grad, attended, plan)
        of_sinks = None
        if sinks is not None:
            by_head = Attended(*attended[:3], out.transpose(0, 1)[None], log_sum[None])
            of_sinks = sink_gradient(grad.transpose(0, 1)[None], by_head, sinks)
        return of_query, *plan.owned(of_keys, of_values, len(key)), of_sinks, None


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: FlashPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the kernel. Shapes: -> output [T, heads, d], log-sum-exps float32 [heads, T]."""
    segments = plan.segments
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        segments.queries,
        segments.keys,
        *segments.longest,
        0.0,
        plan.window is None,
        False,
        scale=plan.scale,
        **_window(plan.window),
    )
    return out, log_sum


def _gradients(
    grad: torch.Tensor, attended: Attended, plan: FlashPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call the kernel's backward pass. Shapes: as in _attend -> gradients of query, keys and values."""
    segments, device = plan.segments, grad.device
    of_query, of_keys, of_values = torch.ops.aten._flash_attention_backward(
        grad,
        *attended,
        segments.queries,
        segments.keys,
        *segments.longest,
        0.0,
        plan.window is None,
        # State of the random numbers for dropout, which is not used.
        torch.zeros(2, dtype=torch.uint64, device=device),
        torch.empty(0, device=device),
        scale=plan.scale,
        **_window(plan.window),
    )
    return of_query, of_keys, of_values


def _window(window: int | None) -> dict[str, int]:
    """Return the kernel's window: the numbers of keys before and after a query's own; -1: all."""
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


# Cached: every layer uses the same segments in forward and backward passes, which need tensors without inference mode.
@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _segments(lengths: tuple[int, ...], part: ContextPart, window: int | None, device: torch.device) -> Segments:
    whole = torch.tensor(lengths)
    if part.size == 1:
        offsets = _offsets(whole).to(device)
        return Segments(offsets, offsets, (max(lengths), max(lengths)), None)
    assert not (whole % part.multiple).any(), f"{lengths} cannot be divided among {part.size} context-parallel ranks"
    # Two segments per sequence, in the order of the row.
    chunk = (whole // part.multiple).repeat_interleave(2)
    number = torch.tensor(part.chunks()).repeat(len(lengths))
    last = (number + 1) * chunk
    first = torch.zeros_like(last) if window is None else (number * chunk - window + 1).clamp(min=0)
    counts = last - first
    # Position of each key in its sequence, and its place on the rank that holds it.
    places = _offsets(counts)
    position = torch.arange(int(places[-1])) + (first - places[:-1]).repeat_interleave(counts)
    size, of_key = part.size, chunk.repeat_interleave(counts)
    held = position // of_key
    owner = torch.minimum(held, 2 * size - 1 - held)
    rank_starts = ((whole.cumsum(0) - whole) // size).repeat_interleave(2).repeat_interleave(counts)
    source = owner * (sum(lengths) // size) + rank_starts + (held >= size) * of_key + position % of_key
    longest = int(chunk.max()), int(counts.max())
    return Segments(_offsets(chunk).to(device), places.to(device), longest, source.to(device))


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Return where consecutive parts of these lengths start, and where the last one ends, int32."""
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
