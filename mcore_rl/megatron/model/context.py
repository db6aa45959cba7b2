"""Context parallelism: distribution of a packed row's tokens over ranks, gathering of values for losses, and causal
self-attention over the ranks on a CPU.

Each sequence is padded to a multiple of 2 * size tokens and split into 2 * size chunks. Rank r holds chunks r and
2 * size - 1 - r, so that all ranks have the same work under a causal mask. Example with two ranks and sequences padded
to 8 and 4 tokens:

    position in the row      0 1 2 3 4 5 6 7   8 9 10 11
    chunk of the sequence    0 0 1 1 2 2 3 3   0 1  2  3
    rank                     0 0 1 1 1 1 0 0   0 1  1  0
    row of rank 0            0 1 6 7           8 11
    row of rank 1            2 3 4 5           9 10

Padding is at the end of a sequence, where no other token attends to it. Imports no megatron.core.

Attention gathers keys and values from all ranks, and reduce-scatters their gradients. The backward pass gathers them
again, so that a layer stores only this rank's share. A sequence has 2 * size chunks. Queries of chunk c attend to chunk
c with a causal mask and to all earlier chunks without a mask; the two results are combined by their log-sum-exps. No
masked-out scores are computed, and each rank does exactly 1 / size of a sequence's work.

Source: the order that TransformerEngine's attention, rotary embeddings and roll_tensor of megatron-core 0.16.1 expect.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True)
class ContextPart:
    """A context-parallel rank and its group (None: never communicates)."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> ContextPart:
        """Return this process's part in a context-parallel group."""
        return cls(group.rank(), group.size(), group)

    @property
    def multiple(self) -> int:
        """The length of every padded sequence must be a multiple of this number."""
        return 2 * self.size if self.size > 1 else 1

    def chunks(self) -> tuple[int, int]:
        """Return the indices of the two chunks of each sequence on this rank, ascending."""
        return self.rank, 2 * self.size - 1 - self.rank

    def positions(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the positions of this rank's tokens within their sequences, in the order of the rank's row.

        Shapes: lengths int64 [sequences], padded -> int64 [sum(lengths) / size].
        """
        rank_lengths = lengths // self.size
        chunk = (rank_lengths // 2).repeat_interleave(rank_lengths)
        starts = (rank_lengths.cumsum(0) - rank_lengths).repeat_interleave(rank_lengths)
        place = torch.arange(len(chunk), device=lengths.device) - starts
        # The first half of the rank's tokens is in its front chunk, the second half in its back chunk.
        front, back = self.chunks()
        return place + torch.where(place < chunk, front * chunk, (back - 1) * chunk)

    def row_indices(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the indices of this rank's tokens in the row of all ranks. Shapes: like `positions`."""
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths // self.size)
        return starts + self.positions(lengths)

    def owners(self, lengths: torch.Tensor) -> torch.Tensor:
        """Rank of every token. Shapes: lengths int64 [sequences], padded -> int64 [sum(lengths)]."""
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        chunk = (lengths // self.multiple).repeat_interleave(lengths)
        number = (torch.arange(len(chunk), device=lengths.device) - starts) // chunk
        return torch.minimum(number, 2 * self.size - 1 - number)

    def gather(self, values: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """Gather per-token values from all ranks. Differentiable: the backward pass sums the gradient over all ranks
        and returns this rank's part, so each rank may continue with its own part of a sum.

        Shapes: owners int64 [N], the rank of each token, equal on all ranks; values [K, n] of this rank's n tokens, in
        the same order; returns [K, N].
        Collective: all ranks of `group`, again in the backward pass.
        """
        return _GatherTokens.apply(values, owners, self)


SINGLE_RANK = ContextPart()
"""No context parallelism: the rank holds the whole row."""


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, values: torch.Tensor, owners: torch.Tensor, part: ContextPart) -> torch.Tensor:
        ctx.part = part
        ctx.save_for_backward(owners)
        counts = owners.bincount(minlength=part.size)
        width = int(counts.max())
        sent = values.new_zeros(width, len(values))  # padded: all_gather needs equal sizes
        sent[: values.shape[1]] = values.t()
        gathered = values.new_empty(part.size * width, len(values))
        dist.all_gather_single(gathered, sent, group=part.group)
        # ordinal: position of each token among the tokens of its owner, hence in the owner's part of the result.
        by_owner = owners.argsort(stable=True)
        first = (counts.cumsum(0) - counts)[owners]
        ordinal = by_owner.argsort() - first
        return gathered.index_select(0, owners * width + ordinal).t().contiguous()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (owners,) = ctx.saved_tensors
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.part.group)
        return total[:, owners == ctx.part.rank], None, None


@dataclass(frozen=True)
class AttentionBlock:
    """One kernel call for all sequences of a group: queries of one chunk and keys at the positions `keys` of the
    sequence."""

    keys: slice
    causal: bool


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences with the same chunk length.

    queries: indices of the queries in the rank's row, int64 [rows * 2 * chunk].
    keys: indices of the keys in the gathered rows of all ranks, by position, up to the end of the rank's later chunk;
    int64 [rows * seen].
    blocks: blocks of each of the rank's two chunks.
    """

    rows: int
    chunk: int
    queries: torch.Tensor
    keys: torch.Tensor
    blocks: list[list[AttentionBlock]]


def attention_blocks(part: ContextPart, chunk: int) -> list[list[AttentionBlock]]:
    """List the blocks of each of the rank's two chunks, for a sequence with chunks of `chunk` tokens; causal first."""
    blocks = []
    for start in (number * chunk for number in part.chunks()):
        earlier = [AttentionBlock(slice(0, start), causal=False)] if start else []
        blocks.append([AttentionBlock(slice(start, start + chunk), causal=True), *earlier])
    return blocks


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
        gathered = _gather_rows(key_value, part)
        out = torch.empty_like(query)
        log_sum = query.new_empty(query.shape[:2], dtype=_accumulation_dtype(query.dtype))
        for group in plan:
            q, kv = _queries(query, group), _keys(gathered, group)
            halves = [_attend_half(half, kv, blocks, scale) for half, blocks in zip(q, group.blocks, strict=True)]
            _put_queries(out, group, torch.stack([attended for attended, _ in halves]))
            _put_queries(log_sum, group, torch.stack([total for _, total in halves]))
        # Save this rank's keys and values, not the gathered ones: the backward pass gathers again.
        ctx.save_for_backward(query, key_value, out, log_sum)
        ctx.plan, ctx.part, ctx.scale = plan, part, scale
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        query, key_value, out, log_sum = ctx.saved_tensors
        gathered = _gather_rows(key_value, ctx.part)
        grad_query = torch.empty_like(query)
        # Several blocks and ranks add to a key's gradient: accumulate in at least float32.
        grad_gathered = torch.zeros_like(gathered, dtype=_accumulation_dtype(query.dtype))
        for group in ctx.plan:
            q, kv, o, g = _queries(query, group), _keys(gathered, group), _queries(out, group), _queries(grad, group)
            total = _queries(log_sum, group)
            grad_q = torch.zeros_like(q, dtype=grad_gathered.dtype)
            grad_kv = torch.zeros_like(kv, dtype=grad_gathered.dtype)
            for h, blocks in enumerate(group.blocks):
                for block in blocks:
                    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                        g[h], q[h], *kv[..., block.keys, :], o[h], total[h], 0.0, block.causal, scale=ctx.scale
                    )
                    grad_q[h] += dq
                    grad_kv[0][..., block.keys, :] += dk
                    grad_kv[1][..., block.keys, :] += dv
            _put_queries(grad_query, group, grad_q)
            rows = grad_kv.transpose(2, 3).flatten(1, 2)
            # Each key belongs to one sequence and therefore to one group: copying is enough.
            grad_gathered.index_copy_(1, group.keys, rows)
        return grad_query, _reduce_scatter(grad_gathered, ctx.part).to(key_value.dtype), None, None, None


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


def _gather_rows(key_value: torch.Tensor, part: ContextPart) -> torch.Tensor:
    """Gather in rank order. Shapes: [2, T, groups, d] -> [2, size * T, groups, d]."""
    by_rank = key_value.new_empty(part.size, *key_value.shape)
    dist.all_gather_single(by_rank.flatten(0, 1), key_value.contiguous(), group=part.group)
    return by_rank.transpose(0, 1).flatten(1, 2)


def _reduce_scatter(whole: torch.Tensor, part: ContextPart) -> torch.Tensor:
    """Sum over ranks and return this rank's part; the transpose of _gather_rows."""
    by_rank = whole.unflatten(1, (part.size, -1)).transpose(0, 1).contiguous()
    summed = torch.empty_like(by_rank[0])
    dist.reduce_scatter_single(summed, by_rank.flatten(0, 1), group=part.group)
    return summed
