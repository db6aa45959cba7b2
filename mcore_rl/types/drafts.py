"""Numbers of draft tokens that an engine has verified and accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mcore_rl.types.metrics import Mean, Metric, Total


@dataclass(frozen=True)
class DraftCounts:
    """Draft tokens since the engine's start, by position in the draft.

    Shapes: verified, accepted int64 [rollout.draft_tokens].
    """

    verified: np.ndarray
    accepted: np.ndarray

    @classmethod
    def zero(cls, num_positions: int) -> DraftCounts:
        return cls(np.zeros(num_positions, np.int64), np.zeros(num_positions, np.int64))

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.verified + other.verified, self.accepted + other.accepted)

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        return DraftCounts(self.verified - earlier.verified, self.accepted - earlier.accepted)

    def with_draft(self, num_tokens: int, num_accepted: int) -> DraftCounts:
        """Add a draft of `num_tokens` tokens, of which the first `num_accepted` were accepted."""
        place = np.arange(len(self.verified))
        return self + DraftCounts(place < num_tokens, place < num_accepted)

    def metrics(self) -> Iterator[tuple[str, Metric]]:
        """Yield the number of draft tokens and the accepted fraction, of all and of each position with drafts."""
        yield "engine/draft_tokens", Total(float(self.verified.sum()))
        if self.verified.any():
            yield "engine/draft_acceptance", Mean(float(self.accepted.sum()), float(self.verified.sum()))
        for position, (verified, accepted) in enumerate(zip(self.verified, self.accepted, strict=True), start=1):
            if verified:
                yield f"engine/draft_acceptance_{position}", Mean(float(accepted), float(verified))
