"""Stand-ins for torch's flash attention kernels on CPUs, with the interface of torch 2.13: offsets of segments, windows
whose last query is at the last key, log-sum-exps [heads, T]. Their backward pass uses the given output and log-sum-exps
like the kernel (T. Dao et al. 2022, "FlashAttention", algorithm 4). They compute in float32, for float64 in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

Segment = tuple[slice, slice, torch.Tensor]


def install() -> torch.library.Library:
    """Register the stand-ins as CPU kernels, as long as the result is kept."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    return library


def _segments(
    offsets: tuple[torch.Tensor, torch.Tensor], longest: tuple[int, int], window: tuple[int, int]
) -> Iterator[Segment]:
    """Yield queries, keys and the visible pairs [queries, keys] of every segment."""
    for each, most in zip(offsets, longest, strict=True):
        assert each.dtype == torch.int32
        assert int(each.diff().max()) <= most
    (left, right), starts = window, [each.tolist() for each in offsets]
    assert right == 0
    for place in range(len(starts[0]) - 1):
        queries, keys = (slice(each[place], each[place + 1]) for each in starts)
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        before = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        visible = before >= 0
        yield queries, keys, visible if left < 0 else visible & (before <= left)


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, window: int, causal: bool
) -> None:
    assert query.dim() == key.dim() == value.dim() == 3
    assert key.shape == value.shape
    assert query.shape[2] == key.shape[2]
    assert query.shape[2] % 8 == 0, "head_size must be a multiple of 8"
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    assert dropout == 0
    assert causal == (window < 0)


def _scale(scale: float | None, query: torch.Tensor) -> float:
    return query.shape[2] ** -0.5 if scale is None else scale


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[n, groups, d] -> [heads, n, d] in the dtype of sums."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32).transpose(0, 1)
    return wide.repeat_interleave(heads // len(wide), 0)


def _forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    **_,
):
    _check(query, key, value, dropout_p, window_size_left, is_causal)
    heads = query.shape[1]
    out, wide = torch.empty_like(query), _by_head(query, heads).dtype
    log_sum = query.new_full((heads, len(query)), torch.nan, dtype=wide)
    segments = _segments((cum_seq_q, cum_seq_k), (max_q, max_k), (window_size_left, window_size_right))
    for rows, columns, visible in segments:
        q, k, v = (_by_head(x, heads) for x in (query[rows], key[columns], value[columns]))
        scores = (_scale(scale, query) * q @ k.mT).masked_fill(~visible, -torch.inf)
        log_sum[:, rows] = scores.logsumexp(-1)
        out[rows] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
    empty = torch.empty(0)
    return out, log_sum, torch.empty(2, dtype=torch.uint64), empty, empty


def _backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    _check(query, key, value, dropout_p, window_size_left, is_causal)
    heads, groups = query.shape[1], key.shape[1]
    assert logsumexp.shape == (heads, len(query))
    assert logsumexp.is_contiguous()
    assert grad_out.dtype == out.dtype == query.dtype
    gradients = tuple(torch.empty_like(x) for x in (query, key, value))
    segments = _segments((cum_seq_q, cum_seq_k), (max_q, max_k), (window_size_left, window_size_right))
    scale = _scale(scale, query)
    for rows, columns, visible in segments:
        q, k, v = (_by_head(x, heads) for x in (query[rows], key[columns], value[columns]))
        g, o = (_by_head(x[rows], heads) for x in (grad_out, out))
        shares = torch.exp((scale * q @ k.mT).masked_fill(~visible, -torch.inf) - logsumexp[:, rows, None])
        of_scores = scale * shares * (g @ v.mT - (g * o).sum(-1, keepdim=True))
        found = of_scores @ k, of_scores.mT @ q, shares.mT @ g
        for target, place, each in zip(gradients, (rows, columns, columns), found, strict=True):
            summed = each.unflatten(0, (target.shape[1], -1)).sum(1)
            target[place] = summed.transpose(0, 1).to(target.dtype)
    assert groups == gradients[1].shape[1]
    return gradients
