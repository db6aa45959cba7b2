"""Sums of log-probabilities over whole responses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SequenceSums:
    """Sums over the trained tokens of each sample, of one rank; `reference` is None without a reference.

    Units: nats.
    """

    policy: dict[int, float]
    reference: dict[int, float] | None


@dataclass(frozen=True)
class SequenceLogp:
    """Sums over the trained tokens of every response of a Batch; `reference` is None without a reference.

    Shapes: float64 [B]. Units: nats.
    """

    policy: np.ndarray
    reference: np.ndarray | None
