"""Speculative decoding that changes no response.

A sampled token is a function of its seed, its position and its probabilities (engines.noise). The token that decoding
without drafts would sample is therefore known as soon as its row is computed, and a draft is accepted if and only if it
equals that token. A pass of a request with L tokens and k drafts d1, ..., dk has k + 1 rows:

    row              0       1       ...   k
    reads            token L - 1   d1    ...   dk
    samples position L       L + 1   ...   L + k

The rows up to the first draft that differs from the sample before it are valid: row 0 always, row j if d1, ..., dj were
all accepted. Each valid row gives one token. Rejection sampling would keep the distribution of responses too, but the
responses themselves would depend on the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

REJECTED = -1
"""Token at the positions after the first rejected draft."""
SHORTEST, LONGEST = 2, 4
"""Lengths of the n-grams whose last occurrence is searched. After a single token, text continues in many ways."""


def row_requests(num_drafts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the request of each row of a pass, and the number of drafts that the row follows.

    num_drafts: drafts of each request.
    Shapes: integer [rows] each, with rows = sum(num_drafts) + requests.
    """
    num_rows = np.array(num_drafts, np.int64) + 1
    requests = np.repeat(np.arange(len(num_rows)), num_rows)
    return requests, np.arange(len(requests)) - (num_rows.cumsum() - num_rows)[requests]


def accept_drafts(
    sampled: torch.Tensor, drafts: torch.Tensor, num_drafts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that a pass adds to each request, followed by REJECTED, and the row of each token.

    sampled: token that each row samples; the rows of a request are adjacent.
    drafts: drafts of all requests, one request after the other.
    Shapes: sampled [rows], drafts [sum(num_drafts)] -> tokens as sampled, rows int64 [requests, max(num_drafts) + 1].
    """
    counts = torch.tensor(num_drafts)[:, None]
    place = torch.arange(int(counts.max()) + 1)
    # Beyond a request's last row, the row is repeated; its token is never valid there.
    rows = (counts + 1).cumsum(0) - (counts + 1) + torch.minimum(place, counts)
    rows = rows.to(sampled.device, non_blocking=True)
    tokens = sampled[rows]
    if not len(drafts):
        return tokens, rows
    of_place = (counts.cumsum(0) - counts + place).clamp(max=len(drafts) - 1).to(sampled.device, non_blocking=True)
    is_draft = (place < counts).to(sampled.device, non_blocking=True)
    equal = (tokens == drafts[of_place]) & is_draft
    valid = equal.cumprod(1).roll(1, 1).bool()
    valid[:, 0] = True
    return tokens.masked_fill(~valid, REJECTED), rows


def continue_ngram(tokens: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return a draft: the tokens that followed the last occurrence of the longest n-gram at the end of `tokens` that
    occurred before, repeated up to num_tokens tokens; empty if not even the shortest one did.

    Shapes: tokens integer [T] -> [num_tokens] or [0].
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    if not len(ends):
        return tokens[:0]
    for back in range(1, LONGEST):
        longer = ends[ends >= back]
        longer = longer[tokens[longer - back] == tokens[-1 - back]]
        if not len(longer):
            if back < SHORTEST:
                return tokens[:0]
            break
        ends = longer
    return np.resize(tokens[ends[-1] + 1 :], num_tokens)
