"""Log-probability and entropy over sets of kept tokens, compared with the same pass over the whole vocabulary.

The aim is at most 1.15 times the time of the pass without sets. The sets are those of top-p with a sharp distribution
(10 tokens), with a flat one (1,000 tokens, stored as ids), and the largest ones (half of the vocabulary, bit sets).
Their tokens are random, so different sets have few tokens in common: the worst case. Real sets share their frequent
tokens. A line of its own measures the division of the sets into groups, which is done once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.result import Result
from benchmarks.sizes import size
from benchmarks.timing import alternating
from mcore_rl.megatron.step.kept_tokens import KeptTokens
from mcore_rl.megatron.step.logprobs import linear_logp_entropy
from mcore_rl.types.token_sets import TokenSets, encode_ids

AIM = "<= 1.15"
HIDDEN, CHUNK_TOKENS = size((1024, 512), (16, 64))
FORWARD, BACKWARD = size(((512, 129_280), (512, 32_320)), ((64, 512), (64, 512)))
SIZES = size((10, 1000, None), (3, 10, None))
"""Tokens in a set; None: half of the vocabulary."""
REPEATS = 3


def run() -> list[Result]:
    return [*_rows("forward", *FORWARD, backward=False), *_rows("forward + backward", *BACKWARD, backward=True)]


def _rows(name: str, tokens: int, vocabulary: int, *, backward: bool) -> list[Result]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_(backward)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator).mul_(0.05).requires_grad_(backward)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)

    def measured(kept: KeptTokens | None) -> None:
        logp, entropy = linear_logp_entropy(states, weight, targets, chunk_tokens=CHUNK_TOKENS, kept=kept)
        if backward:
            torch.autograd.grad((logp + 0.01 * entropy).sum(), (states, weight))

    rows = []
    for kept_tokens in SIZES:
        count = kept_tokens or vocabulary // 2
        sets = _sets(targets.numpy(), vocabulary, count)
        grouping = partial(KeptTokens.of, sets, torch.from_numpy)
        calls: list[Callable[[], object]] = [partial(measured, grouping()), partial(measured, None), grouping]
        masked, plain, grouped = map(min, alternating(calls, REPEATS))
        label = f"{name}, {tokens:,} x {vocabulary:,}, sets of {count:,}"
        note = f"hidden {HIDDEN}, {torch.get_num_threads()} threads; the peer is the same pass without sets"
        rows.append(Result(label, masked, plain, "s", masked / plain, aim=AIM, note=note))
        rows.append(Result(f"{label}: groups", grouped, plain, "s", grouped / plain, note=note))
    return rows


def _sets(targets: np.ndarray, vocabulary: int, count: int) -> TokenSets:
    """Build sets of about `count` tokens with the target."""
    generator = np.random.default_rng(0)
    drawn = (np.append(generator.integers(0, vocabulary, count - 1), target) for target in targets)
    return TokenSets.of([encode_ids(np.unique(ids), vocabulary) for ids in drawn])
