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

from mcore_rl.megatron.model.attention.blocks import (
    Attended,
    BlockPlan,
    KeyBlock,
    QueryBlock,
    accumulation_dtype,
    attend,
    attention_gradients,
    sink_gradient,
    window_blocks,
)


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
class SequenceGroup:
    """Sequences with the same chunk length.

    queries: indices of the queries in the rank's row, int64 [rows * 2 * chunk].
    keys: indices of the keys in the gathered rows of all ranks, by position, up to the end of the rank's later chunk;
    int64 [rows * seen].
    blocks: blocks of a sequence's 2 * chunk queries on this rank.
    """

    rows: int
    queries: torch.Tensor
    keys: torch.Tensor
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True)
class ContextPlan:
    """Sequences of a row in groups, this rank's part, and the factor of the scores."""

    groups: tuple[SequenceGroup, ...]
    part: ContextPart
    scale: float


def attention_blocks(part: ContextPart, chunk: int, window: int | None = None) -> tuple[QueryBlock, ...]:
    """List the blocks of the rank's two chunks of a sequence, for chunks of `chunk` tokens. window: see
    context_attention."""
    blocks: list[QueryBlock] = []
    for index, number in enumerate(part.chunks()):
        queries, start = slice(index * chunk, (index + 1) * chunk), number * chunk
        if window is not None and window < start + chunk:
            blocks += window_blocks(queries, start, window)
            continue
        own = KeyBlock(slice(start, start + chunk), causal=True)
        blocks.append(QueryBlock(queries, (own, KeyBlock(slice(0, start))) if start else (own,)))
    return tuple(blocks)


def context_attention(
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
    """Compute causal softmax attention within each sequence, across ranks.

    Shapes: query [T, heads, d], key [T, groups, d], value [T, groups, e] of this rank's tokens -> [T, heads, e].
    lengths: padded lengths of the whole sequences. scale None: 1 / sqrt(d). window: a query sees this number of keys,
    its own included; None: all earlier ones. sinks: see block_attention, [heads]; their gradient is this rank's part.
    Collective: all ranks of part.group, once in the forward pass and twice in the backward pass.
    """
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    # The kernel needs equal head widths. Zero padding changes no score and adds zeros to values, which are cut off.
    heads = max(width, value.shape[-1])
    q, k, v = (F.pad(x, (0, heads - x.shape[-1])) for x in (query, key, value))
    plan = ContextPlan(_groups(lengths, part, window, query.device), part, scale)
    return _ContextAttention.apply(q, torch.stack((k, v)), sinks, plan)[..., : value.shape[-1]]


# Cached tensors must not be inference tensors: backward passes use them too.
@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _groups(
    lengths: tuple[int, ...], part: ContextPart, window: int | None, device: torch.device
) -> tuple[SequenceGroup, ...]:
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
        blocks = attention_blocks(part, chunk, window)
        groups.append(SequenceGroup(len(starts), queries.flatten().to(device), keys.flatten().to(device), blocks))
    return tuple(groups)


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: torch.Tensor,
        key_value: torch.Tensor,
        sinks: torch.Tensor | None,
        plan: ContextPlan,
    ) -> torch.Tensor:
        """Shapes: query [T, heads, d]; key_value [2, T, groups, d]; sinks [heads]; returns [T, heads, d]."""
        gathered = gather_rows(key_value, plan.part)
        out = torch.empty_like(query)
        log_sum = query.new_empty(query.shape[:2], dtype=accumulation_dtype(query.dtype))
        for group in plan.groups:
            blocks = BlockPlan(group.blocks, plan.scale)
            keys, values = _keys(gathered, group)
            results = attend(_queries(query, group), keys, values, blocks, sinks)
            for row, cells in zip((out, log_sum), results, strict=True):
                _put_queries(row, group, cells)
        # Save this rank's keys and values, not the gathered ones: the backward pass gathers again.
        ctx.save_for_backward(query, key_value, sinks, out, log_sum)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        query, key_value, sinks, out, log_sum = ctx.saved_tensors
        plan: ContextPlan = ctx.plan
        gathered = gather_rows(key_value, plan.part)
        grad_query = torch.empty_like(query)
        # Several blocks and ranks add to a key's gradient: accumulate in at least float32.
        grad_gathered = torch.zeros_like(gathered, dtype=accumulation_dtype(query.dtype))
        grad_sinks = None if sinks is None else torch.zeros_like(sinks)
        for group in plan.groups:
            q, o, total, g = (_queries(x, group) for x in (query, out, log_sum, grad))
            keys, values = _keys(gathered, group)
            attended = Attended(q, keys, values, o, total)
            grad_q, *grad_kv = attention_gradients(g, attended, BlockPlan(group.blocks, plan.scale))
            _put_queries(grad_query, group, grad_q)
            rows = torch.stack(grad_kv).transpose(2, 3).flatten(1, 2)
            # Each key belongs to one sequence and therefore to one group: copying is enough.
            grad_gathered.index_copy_(1, group.keys, rows)
            if sinks is not None:
                grad_sinks += sink_gradient(g, attended, sinks)
        grad_key_value = reduce_scatter_rows(grad_gathered, plan.part).to(key_value.dtype)
        return grad_query, grad_key_value, grad_sinks, None


def _queries(row: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Select the group's queries. Shapes: [T, heads, ...] -> [rows, heads, 2 * chunk, ...]."""
    return row.index_select(0, group.queries).unflatten(0, (group.rows, -1)).transpose(1, 2)


def _put_queries(row: torch.Tensor, group: SequenceGroup, cells: torch.Tensor) -> None:
    """Write into `row` the inverse of _queries."""
    row.index_copy_(0, group.queries, cells.transpose(1, 2).flatten(0, 1).to(row.dtype))


def _keys(gathered: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Select the group's keys and values. Shapes: [2, T * size, groups, d] -> [2, rows, groups, seen, d]."""
    return gathered.index_select(1, group.keys).unflatten(1, (group.rows, -1)).transpose(2, 3)


def gather_rows(key_value: torch.Tensor, part: ContextPart) -> torch.Tensor:
    """Gather in rank order. Shapes: [2, T, groups, d] -> [2, size * T, groups, d]."""
    by_rank = key_value.new_empty(part.size, *key_value.shape)
    dist.all_gather_single(by_rank.flatten(0, 1), key_value.contiguous(), group=part.group)
    return by_rank.transpose(0, 1).flatten(1, 2)


def reduce_scatter_rows(whole: torch.Tensor, part: ContextPart) -> torch.Tensor:
    """Sum over ranks and return this rank's part; the transpose of gather_rows."""
    by_rank = whole.unflatten(1, (part.size, -1)).transpose(0, 1).contiguous()
    summed = torch.empty_like(by_rank[0])
    dist.reduce_scatter_single(summed, by_rank.flatten(0, 1), group=part.group)
    return summed
