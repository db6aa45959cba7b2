"""Causal self-attention over context-parallel ranks on a CPU; tokens are ordered as in `context`.

Keys and values are gathered from all ranks, and their gradients are reduce-scattered. The backward pass gathers them
again, so that a layer stores only this rank's share. A sequence has 2 * size chunks. Queries of chunk c attend to chunk
c with a causal mask and to all earlier chunks without a mask; the two results are combined by their log-sum-exps. No
masked-out scores are computed, and each rank does exactly 1 / size of a sequence's work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx

from mcore_rl.megatron.model.context import ContextPart


@dataclass(frozen=True)
class AttentionBlock:
    """One kernel call for all sequences of a group: queries of one of the rank's two chunks (`half` 0 or 1) and keys at
    the positions `keys` of the sequence."""

    half: int
    keys: slice
    causal: bool


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences with the same chunk length.

    queries: indices of the queries in the rank's row, int64 [rows * 2 * chunk].
    keys: indices of the keys in the gathered rows of all ranks, by position, up to the end of the rank's later chunk;
    int64 [rows * seen].
    """

    rows: int
    chunk: int
    queries: torch.Tensor
    keys: torch.Tensor
    blocks: tuple[AttentionBlock, ...]


def attention_blocks(part: ContextPart, chunk: int) -> tuple[AttentionBlock, ...]:
    """List the blocks that a rank computes for a sequence with chunks of `chunk` tokens; per half, causal first."""
    blocks = []
    for half, number in enumerate(part.chunks()):
        start = number * chunk
        blocks.append(AttentionBlock(half, slice(start, start + chunk), causal=True))
        if start:
            blocks.append(AttentionBlock(half, slice(0, start), causal=False))
    return tuple(blocks)


def context_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    part: ContextPart,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute causal softmax attention within each sequence, across ranks.

    Shapes: query [T, heads, d], key [T, groups, d], value [T, groups, e] of this rank's tokens -> [T, heads, e].
    lengths: padded lengths of the whole sequences. scale None: 1 / sqrt(d).
    Collective: all ranks of part.group, once in the forward pass and twice in the backward pass.
    """
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    # The kernel needs equal head widths. Zero padding changes no score and adds zeros to values, which are cut off.
    heads = max(width, value.shape[-1])
    q, k, v = (F.pad(x, (0, heads - x.shape[-1])) for x in (query, key, value))
    plan = _plan(lengths, part, query.device)
    return _ContextAttention.apply(q, torch.stack((k, v)), plan, part, scale)[..., : value.shape[-1]]


# Cached tensors must not be inference tensors: backward passes use them too.
@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _plan(lengths: tuple[int, ...], part: ContextPart, device: torch.device) -> tuple[SequenceGroup, ...]:
    """Group sequences by chunk length. Cached: every layer uses the same plan in forward and backward passes."""
    size, rank_tokens = part.size, sum(lengths) // part.size
    by_chunk: dict[int, list[int]] = {}
    start = 0
    for length in lengths:
        assert length % part.multiple == 0, f"{length} tokens cannot be divided among {size} context-parallel ranks"
        by_chunk.setdefault(length // part.multiple, []).append(start // size)
        start += length
    groups = []
    for chunk, starts in by_chunk.items():
        first = torch.tensor(starts)[:, None]
        queries = first + torch.arange(2 * chunk)
        number, offset = torch.arange(2 * size).repeat_interleave(chunk), torch.arange(chunk).repeat(2 * size)
        owner = torch.minimum(number, 2 * size - 1 - number)
        source = owner * rank_tokens + (number >= size) * chunk + offset
        keys = first + source[: (part.chunks()[1] + 1) * chunk]
        blocks = attention_blocks(part, chunk)
        groups.append(
            SequenceGroup(len(starts), chunk, queries.flatten().to(device), keys.flatten().to(device), blocks)
        )
    return tuple(groups)


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: torch.Tensor,
        key_value: torch.Tensor,
        plan: tuple[SequenceGroup, ...],
        part: ContextPart,
        scale: float,
    ) -> torch.Tensor:
        """Shapes: query [T, heads, d]; key_value [2, T, groups, d]; returns [T, heads, d]."""
        gathered = _gather(key_value, part)
        out = torch.empty_like(query)
        log_sum = query.new_empty(query.shape[:2], dtype=_accumulation_dtype(query.dtype))
        for group in plan:
            q, kv = _queries(query, group), _keys(gathered, group)
            halves = [_attend_half(q[half], kv, blocks, scale) for half, blocks in _by_half(group)]
            _put_queries(out, group, torch.stack([attended for attended, _ in halves]))
            _put_queries(log_sum, group, torch.stack([total for _, total in halves]))
        # Save this rank's keys and values, not the gathered ones: the backward pass gathers again.
        ctx.save_for_backward(query, key_value, out, log_sum)
        ctx.plan, ctx.part, ctx.scale = plan, part, scale
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        query, key_value, out, log_sum = ctx.saved_tensors
        gathered = _gather(key_value, ctx.part)
        grad_query = torch.empty_like(query)
        # Several blocks and ranks add to a key's gradient: accumulate in at least float32.
        grad_gathered = torch.zeros_like(gathered, dtype=_accumulation_dtype(query.dtype))
        for group in ctx.plan:
            q, kv, o, g = _queries(query, group), _keys(gathered, group), _queries(out, group), _queries(grad, group)
            total = _queries(log_sum, group)
            grad_q = torch.zeros_like(q, dtype=grad_gathered.dtype)
            grad_kv = torch.zeros_like(kv, dtype=grad_gathered.dtype)
            for block in group.blocks:
                h, keys = block.half, block.keys
                dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    g[h], q[h], *kv[..., keys, :], o[h], total[h], 0.0, block.causal, scale=ctx.scale
                )
                grad_q[h] += dq
                grad_kv[0][..., keys, :] += dk
                grad_kv[1][..., keys, :] += dv
            _put_queries(grad_query, group, grad_q)
            rows = grad_kv.transpose(2, 3).flatten(1, 2)
            # Each key belongs to one sequence and therefore to one group: copying is enough.
            grad_gathered.index_copy_(1, group.keys, rows)
        return grad_query, _reduce_scatter(grad_gathered, ctx.part).to(key_value.dtype), None, None, None


def _by_half(group: SequenceGroup) -> Iterator[tuple[int, list[AttentionBlock]]]:
    for half in (0, 1):
        yield half, [block for block in group.blocks if block.half == half]


def _attend_half(
    q: torch.Tensor, kv: torch.Tensor, blocks: list[AttentionBlock], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of the queries to all their blocks, and its log-sum-exp.

    Shapes: q [rows, heads, chunk, d]; kv [2, rows, groups, seen, d] -> like q, and [rows, heads, chunk].
    """
    parts = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, *kv[..., block.keys, :], 0.0, block.causal, scale=scale
        )
        for block in blocks
    ]
    if len(parts) == 1:
        return parts[0]
    # Combine the causal block and the block of earlier chunks, weighted by their shares of the softmax denominator.
    log_sum = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(attended * torch.exp(part - log_sum)[..., None] for attended, part in parts)
    return out.to(q.dtype), log_sum


def _queries(row: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Select the group's queries. Shapes: [T, heads, ...] -> [2, rows, heads, chunk, ...]."""
    cells = row.index_select(0, group.queries).unflatten(0, (group.rows, 2, group.chunk))
    return cells.transpose(0, 1).transpose(2, 3)


def _put_queries(row: torch.Tensor, group: SequenceGroup, cells: torch.Tensor) -> None:
    """Write into `row` the inverse of _queries."""
    flat = cells.transpose(2, 3).transpose(0, 1).flatten(0, 2)
    row.index_copy_(0, group.queries, flat.to(row.dtype))


def _keys(gathered: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Select the group's keys and values. Shapes: [2, T * size, groups, d] -> [2, rows, groups, seen, d]."""
    return gathered.index_select(1, group.keys).unflatten(1, (group.rows, -1)).transpose(2, 3)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _gather(key_value: torch.Tensor, part: ContextPart) -> torch.Tensor:
    """All-gather in rank order. Shapes: [2, T, groups, d] -> [2, size * T, groups, d]."""
    by_rank = key_value.new_empty(part.size, *key_value.shape)
    dist.all_gather_single(by_rank.flatten(0, 1), key_value.contiguous(), group=part.group)
    return by_rank.transpose(0, 1).flatten(1, 2)


def _reduce_scatter(whole: torch.Tensor, part: ContextPart) -> torch.Tensor:
    """Sum over ranks and return this rank's part; the transpose of _gather."""
    by_rank = whole.unflatten(1, (part.size, -1)).transpose(0, 1).contiguous()
    summed = torch.empty_like(by_rank[0])
    dist.reduce_scatter_single(summed, by_rank.flatten(0, 1), group=part.group)
    return summed
