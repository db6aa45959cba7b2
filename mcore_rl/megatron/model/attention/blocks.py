"""Softmax attention in blocks with torch's flash attention for CPUs: sliding windows, attention sinks, and queries
whose keys are in several blocks.

A sink s_h is a learned score of head h that takes part in the softmax with a value of zero. With the log-sum-exp L_i of
query i's scores z_ij, everything follows from L'_i = log(exp(L_i) + exp(s_h)):

    output      o'_i = o_i exp(L_i - L'_i)
    gradients   of z_ij: exp(z_ij - L'_i) (g_i v_j - g_i o'_i), the kernel's own formula with o' and L'
                of s_h:  - sum over i of exp(s_h - L'_i) g_i o'_i

A sliding window of w keys lets a query attend to itself and the w - 1 keys before it. Its queries are divided into
blocks, each with the keys that at least one of its queries sees, so compute and memory grow with the number of tokens
times w. The kernel stores no probabilities. Imports no megatron.core.

Source: T. Dao et al. 2022, "FlashAttention", appendix B.2, for the backward pass; arXiv 2309.17453 and transformers'
modeling_gpt_oss.py (5.19) for sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.autograd.function import FunctionCtx

QUERY_BLOCK = (128, 512)
"""Fewest and most queries of a window's block. A block of n queries computes n (n + w) scores."""


@dataclass(frozen=True)
class KeyBlock:
    """Keys of one kernel call.

    keys: positions in the sequence.
    causal: the queries have the positions of `keys`, and each attends to its own key and the earlier ones.
    window: number of keys that a query sees, its own included, if the call needs a mask; the last query has the
    position of the last key.
    """

    keys: slice
    causal: bool = False
    window: int | None = None


@dataclass(frozen=True)
class QueryBlock:
    """Queries, as positions among the given ones, and the blocks of keys that they attend to."""

    queries: slice
    parts: tuple[KeyBlock, ...]


@dataclass(frozen=True)
class BlockPlan:
    """Blocks of all queries, and the factor of the scores."""

    blocks: tuple[QueryBlock, ...]
    scale: float


class Attended(NamedTuple):
    """Inputs and results of `attend` that the backward pass needs.

    Shapes: query and out [rows, heads, n, d]; key and value [rows, groups, m, d]; log_sum [rows, heads, n].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    log_sum: torch.Tensor


def causal_blocks(length: int, window: int | None) -> tuple[QueryBlock, ...]:
    """List the blocks of a whole sequence under a causal mask."""
    if window is None or window >= length:
        whole = slice(0, length)
        return (QueryBlock(whole, (KeyBlock(whole, causal=True),)),)
    return window_blocks(slice(0, length), 0, window)


def window_blocks(queries: slice, position: int, window: int) -> tuple[QueryBlock, ...]:
    """List the blocks of consecutive queries, of which the first has this position in its sequence."""
    fewest, most = QUERY_BLOCK
    size, shift = min(max(window, fewest), most), position - queries.start
    blocks = []
    for start in range(queries.start, queries.stop, size):
        end = min(start + size, queries.stop)
        keys = slice(max(start + shift - window + 1, 0), end + shift)
        causal = keys.start == start + shift and window >= end - start
        blocks.append(QueryBlock(slice(start, end), (KeyBlock(keys, causal, None if causal else window),)))
    return tuple(blocks)


def block_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: BlockPlan, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute attention of the queries to the keys of their blocks. Differentiable, also in `sinks`.

    Shapes: query [rows, heads, n, d], key and value [rows, groups, m, d], sinks [heads] -> [rows, heads, n, d].
    """
    out: torch.Tensor = _BlockAttention.apply(query, key, value, sinks, plan)
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        plan: BlockPlan,
    ) -> torch.Tensor:
        out, log_sum = attend(query, key, value, plan, sinks)
        ctx.save_for_backward(query, key, value, out, log_sum, sinks)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *saved, sinks = ctx.saved_tensors
        attended = Attended(*saved)
        gradients = attention_gradients(grad, attended, ctx.plan)
        of_sinks = None if sinks is None else sink_gradient(grad, attended, sinks)
        return *(gradient.to(grad.dtype) for gradient in gradients), of_sinks, None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: BlockPlan, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention and the log-sum-exps with the sinks.

    Shapes: as block_attention -> like query, and [rows, heads, n] in at least float32.
    """
    # The layout in which callers continue, [rows, n, heads, d], so that their transposition is a view.
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    log_sum = query.new_empty(query.shape[:3], dtype=accumulation_dtype(query.dtype))
    for block in plan.blocks:
        rows = slice(None), slice(None), block.queries
        out[rows], log_sum[rows] = _attend_block(query[rows], key, value, block.parts, plan.scale, sinks)
    return out, log_sum


def _attend_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: Sequence[KeyBlock],
    scale: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    results = []
    for part in parts:
        k, v, mask = key[..., part.keys, :], value[..., part.keys, :], _mask(query, part)
        results.append(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, k, v, 0.0, part.causal, attn_mask=mask, scale=scale
            )
        )
    if len(results) == 1 and sinks is None:
        return results[0]
    out, log_sum = combine(results, sinks)
    return out.to(query.dtype), log_sum


def combine(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention to separate sets of keys, and to the sinks, weighted by their shares of the softmax
    denominator.

    Shapes: parts are outputs [..., heads, n, d] and log-sum-exps [..., heads, n], sinks [heads] -> one such part, in
    the dtype of the log-sum-exps.
    """
    log_sum = parts[0][1]
    for _, other in parts[1:]:
        log_sum = torch.logaddexp(log_sum, other)
    if sinks is not None:
        log_sum = torch.logaddexp(log_sum, sinks.to(log_sum.dtype)[:, None])
    shares = [attended * torch.exp(part - log_sum)[..., None] for attended, part in parts]
    return sum(shares[1:], start=shares[0]), log_sum


def attention_gradients(
    grad: torch.Tensor, attended: Attended, plan: BlockPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of query, key and value in at least float32, because several blocks add to them."""
    query, key, value, out, log_sum = attended
    dtype = accumulation_dtype(query.dtype)
    of_query, of_key, of_value = (torch.zeros_like(x, dtype=dtype) for x in (query, key, value))
    for block in plan.blocks:
        rows = slice(None), slice(None), block.queries
        for part in block.parts:
            q, k, v = query[rows], key[..., part.keys, :], value[..., part.keys, :]
            mask = _mask(q, part)
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[rows], q, k, v, out[rows], log_sum[rows], 0.0, part.causal, attn_mask=mask, scale=plan.scale
            )
            of_query[rows] += dq
            of_key[..., part.keys, :] += dk
            of_value[..., part.keys, :] += dv
    return of_query, of_key, of_value


def sink_gradient(grad: torch.Tensor, attended: Attended, sinks: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of the sinks. Shapes: grad like attended.out -> [heads]."""
    share = torch.exp(sinks.to(attended.log_sum.dtype)[:, None] - attended.log_sum)
    inner = (grad.to(share.dtype) * attended.out).sum(-1)
    return -(share * inner).sum((0, 2)).to(sinks.dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of products of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _mask(query: torch.Tensor, part: KeyBlock) -> torch.Tensor | None:
    """Return the mask of a kernel call: 0 for visible keys, else -inf; None if it needs none."""
    if part.window is None:
        return None
    return _band(query.shape[2], part.keys.stop - part.keys.start, part.window, query.dtype)


# All layers and most blocks of a sequence share one mask.
@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _band(queries: int, keys: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a window's mask [queries, keys]; the last query is at the position of the last key."""
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    visible = (distance >= 0) & (distance < window)
    return torch.zeros(queries, keys, dtype=dtype).masked_fill_(~visible, -torch.inf)
