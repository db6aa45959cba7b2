"""Difference between the engine's and the trainer's log-probabilities of the same tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mcore_rl.types.metrics import Max, Mean, Quantile


@dataclass(frozen=True)
class LogpGap:
    """Absolute differences of log-probabilities. Gaps of several ranks are combined with `+`.

    `own_routing`: the trainer computed the routing of a mixture-of-experts model itself instead of replaying the
    engine's.
    Units: nats.
    """

    mean: Mean
    median: Quantile
    largest: Max
    own_routing: bool

    @classmethod
    def between(cls, differences: Iterable[float], *, own_routing: bool) -> LogpGap:
        """Summarize absolute differences, one per token."""
        values = list(differences)
        return cls(
            Mean(math.fsum(values), len(values)),
            Quantile(0.5, Counter(values)),
            Max(max(values, default=0.0)),
            own_routing,
        )

    def __add__(self, other: LogpGap) -> LogpGap:
        return LogpGap(
            self.mean + other.mean,
            self.median + other.median,
            self.largest + other.largest,
            self.own_routing or other.own_routing,
        )

    @property
    def num_tokens(self) -> int:
        return int(self.mean.count)

    @property
    def typical(self) -> float:
        """Mean difference, or the median if the trainer computed the routing itself. Rounding then sends some tokens to
        other experts and changes their log-probabilities a lot, whereas a systematic error shifts most tokens. Not
        finite if any token's difference is not finite."""
        if self.own_routing and math.isfinite(self.mean.value):
            return self.median.value
        return self.mean.value
