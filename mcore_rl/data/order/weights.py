"""How often each row is drawn in an epoch, where the files of data.train have weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_PARTS = 1_000_000
"""Weights are whole numbers of these, so that no rounding depends on a platform."""


@dataclass(frozen=True)
class RowWeights:
    """`rows` of each file, which lie one file after the other, and their `weights`.

    In E epochs a row of weight w is drawn floor(w E) or ceil(w E) times, and a file of n rows floor(n w E) times. Which
    rows are ahead depends on `seed` alone, so an epoch needs no state.
    """

    rows: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

    def counts(self, epoch: int) -> np.ndarray:
        """How often the epoch draws each row: int64 [N]."""
        counts = [
            self._counts_of_file(file, num_rows, weight, epoch)
            for file, (num_rows, weight) in enumerate(zip(self.rows, self.weights, strict=True))
        ]
        return np.concatenate(counts)

    def identity(self) -> list[list[float]]:
        """For a checkpoint: what must be the same for draws to go on."""
        return [[rows, weight] for rows, weight in zip(self.rows, self.weights, strict=True)]

    def _counts_of_file(self, file: int, num_rows: int, weight: float, epoch: int) -> np.ndarray:
        """floor(w (epoch + 1) + phase) - floor(w epoch + phase), the phases k / n in a random order: by Hermite's
        identity, their sum is floor(n w (epoch + 1)) - floor(n w epoch)."""
        whole, part = divmod(max(round(weight * _PARTS), 1), _PARTS)
        if not part or not num_rows:
            return np.full(num_rows, whole, np.int64)
        # The last word keeps this stream apart from those of (seed, epoch), of which zeros at the end are no part.
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, file, 1])).random_raw(num_rows)
        phases = np.argsort(np.argsort(bits, kind="stable"), kind="stable").astype(np.int64) * _PARTS
        before = epoch * part % _PARTS * num_rows
        whole_parts = _PARTS * num_rows
        return whole + (before + part * num_rows + phases) // whole_parts - (before + phases) // whole_parts
