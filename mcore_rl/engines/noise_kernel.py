"""Triton kernel of noise.sample_tokens: one pass over the probabilities, without memory for the noise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 4096, 16
"""Logits per step of a program, which samples one row, and its warps of 32 threads."""


def sample_tokens(probabilities: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Implement noise.sample_tokens on the current GPU."""
    rows, columns = probabilities.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=probabilities.device)
    if rows:
        probabilities = probabilities.contiguous()
        _sample[(rows,)](probabilities, keys, tokens, columns, BLOCK=_BLOCK, num_warps=_WARPS)
    return tokens


@triton.jit
def _sample(probabilities, keys, tokens, columns, BLOCK: tl.constexpr):
    """Sample the token of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    best = tl.full([BLOCK], float("-inf"), tl.float64)
    best_token = tl.zeros([BLOCK], tl.int64)
    for start in range(0, columns, BLOCK):
        token = start + tl.arange(0, BLOCK).to(tl.int64)
        present = token < columns
        x = key + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = (x ^ (x >> 31)) >> 12
        log_uniform = tl.log((x.to(tl.float64) + 0.5) * 2.220446049250313e-16)
        probability = tl.load(probabilities + row * columns + token, mask=present, other=0.0).to(tl.float64)
        time = tl.where(present, log_uniform / probability, float("-inf"))
        better = time > best
        best = tl.where(better, time, best)
        best_token = tl.where(better, token, best_token)
    lane = tl.argmax(best, axis=0)
    tl.store(tokens + row, tl.sum(tl.where(tl.arange(0, BLOCK) == lane, best_token, 0), axis=0))
