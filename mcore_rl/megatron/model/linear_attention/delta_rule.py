"""The gated delta rule of packed rows, with torch's operations or fla's kernels.

A head has a state S [key size, value size] that starts with zeros in every sequence. A token with query q, key k, value
v, decay a (its logarithm is given) and strength b computes

    S <- a S + b k (v - (a S)^T k)^T,  output S^T q / sqrt(key size).

Within a chunk the corrections of all tokens solve a unit triangular system, so that only the states between chunks are
computed one after the other. Source: Yang et al., Gated Delta Networks (arXiv 2412.06464), section 3.3; the same chunks
as in transformers and fla.
"""

from __future__ import annotations

import torch

from mcore_rl.megatron.model.linear_attention.chunks import ChunkedRow, chunked_row, sequence_offsets


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
    lengths: tuple[int, ...],
) -> torch.Tensor:
    """Apply the rule to each sequence of a packed row, in float32, and return the values' dtype.

    Shapes: query and key [T, heads, key size], value [T, heads, value size], log_decay and strength [T, heads] ->
    [T, heads, value size]. Units: lengths in tokens; their sum is T.
    """
    # fla's kernels reject float32 (0.4), for which torch's operations are exact on GPUs too.
    if value.is_cuda and value.dtype != torch.float32:
        return _fla(query, key, value, log_decay, strength, sequence_offsets(lengths, value.device))
    row = chunked_row(lengths, value.device)
    wide = torch.promote_types(value.dtype, torch.float32)
    parts = (row.pad(x.to(wide)) for x in (query, key, value, log_decay, strength))
    return row.unpad(_chunked(row, *parts)).to(value.dtype)


def _fla(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    # Imported here: the package needs triton and a GPU.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    row = (x[None].contiguous() for x in (query, key, value, log_decay.float(), strength))
    output, _ = chunk_gated_delta_rule(*row, cu_seqlens=offsets)
    return output[0]


def _chunked(
    row: ChunkedRow,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
) -> torch.Tensor:
    """Apply the rule to chunks, whose padding has zeros in all inputs and so changes no state.

    Shapes: [chunks, heads, CHUNK, size] and [chunks, heads, CHUNK] -> [chunks, heads, CHUNK, value size].
    """
    total = log_decay.cumsum(-1)
    # Zeros above the diagonal before exp: the decay between a token and a later one would overflow.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    from_start, to_end = total.exp().unsqueeze(-1), (total[..., -1:] - total).exp().unsqueeze(-1)
    weighted = key * strength.unsqueeze(-1)
    system = (weighted @ key.mT * between).tril(-1)
    given = torch.cat((value * strength.unsqueeze(-1), weighted * from_start), -1)
    # The diagonal counts as ones.
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    corrected, forgotten = solved.split((value.shape[-1], key.shape[-1]), -1)
    query = query * query.shape[-1] ** -0.5
    return _recurrence(
        (query @ key.mT * between, query * from_start, key * to_end, corrected, forgotten),
        total[..., -1:].exp().unsqueeze(-1),
        row.active,
    )


def _recurrence(parts: tuple[torch.Tensor, ...], decay: torch.Tensor, active: tuple[int, ...]) -> torch.Tensor:
    """Compute the states between chunks and the outputs; `decay` [chunks, heads, 1, 1] is the decay over a chunk."""
    outputs, state, first = [], None, 0
    for step, count in enumerate(active):
        scores, query, key, new, forgotten = (part[first : first + count] for part in parts)
        if state is None:
            outputs.append(scores @ new)
        else:
            new = new - forgotten @ state
            outputs.append(query @ state + scores @ new)
        if step + 1 < len(active):
            later = active[step + 1]
            added = key[:later].mT @ new[:later]
            state = added if state is None else state[:later] * decay[first : first + later] + added
        first += count
    return torch.cat(outputs)
