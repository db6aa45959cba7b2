"""Log-probabilities of given tokens, as engines and servers return them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

SMALLEST_REST = float(np.finfo(np.float32).eps)
"""Lowest probability of all tokens together that are not listed: log-probabilities in float32 do not resolve less."""


@dataclass(frozen=True)
class TokenSequence:
    """Tokens of a sequence. The log-probabilities of those from `start` (at least 1) are wanted.

    Shapes: token_ids int32 [S].
    """

    token_ids: np.ndarray
    start: int


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of tokens, each given all tokens before it, over the whole vocabulary: at temperature 1 from
    engines and servers, at the temperature of each token from Megatron ranks.

    top_ids, top_logp: the most probable tokens; the last column of top_logp is the probability of all other tokens.
    None if they were not requested.

    Shapes: logp float32 [n]; top_ids int32 [n, k]; top_logp float32 [n, k + 1]. Units: nats.
    """

    logp: np.ndarray
    top_ids: np.ndarray | None = None
    top_logp: np.ndarray | None = None

    @classmethod
    def of(cls, logp: np.ndarray, top_ids: np.ndarray, top_logp: np.ndarray) -> TokenScores:
        """Add the probability of the other tokens. Shapes: logp [n]; top_ids, top_logp [n, k], k may be 0."""
        if not top_ids.shape[1]:
            return cls(logp.astype(np.float32))
        listed = np.exp(top_logp.astype(np.float64)).sum(1, keepdims=True)
        rest = np.log(np.maximum(1 - listed, SMALLEST_REST))
        joined = np.concatenate([top_logp, rest], axis=1)
        return cls(logp.astype(np.float32), top_ids.astype(np.int32), joined.astype(np.float32))

    def take(self, chosen: np.ndarray) -> TokenScores:
        """Return the entries `chosen` (indices or flags) of every array."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return TokenScores(**{name: value[chosen] for name, value in given.items()})

    @classmethod
    def joined(cls, parts: list[TokenScores]) -> TokenScores:
        """Concatenate at least one part; all have the same fields."""
        names = [name for name, value in vars(parts[0]).items() if value is not None]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True)
class ScoreColumn:
    """Scores of the trained tokens of some samples; lives in the object store.

    Shapes: samples int64 [b] indices into the Batch; offsets int64 [b + 1]; scores of offsets[-1] tokens.
    """

    samples: np.ndarray
    offsets: np.ndarray
    scores: TokenScores

    @classmethod
    def of(cls, by_sample: Mapping[int, TokenScores]) -> ScoreColumn:
        """Concatenate the scores of at least one sample."""
        offsets = np.zeros(len(by_sample) + 1, np.int64)
        np.cumsum([len(scores.logp) for scores in by_sample.values()], out=offsets[1:])
        samples = np.fromiter(by_sample, np.int64, len(by_sample))
        return cls(samples, offsets, TokenScores.joined(list(by_sample.values())))

    def by_sample(self) -> dict[int, TokenScores]:
        """Split into the scores of each sample."""
        edges = zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True)
        parts = [self.scores.take(np.arange(start, end)) for start, end in edges]
        return dict(zip(self.samples.tolist(), parts, strict=True))
