"""Number of draws per row and epoch, for files of data.train with weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_PARTS = 1_000_000
"""Weights are rounded to multiples of 1 / _PARTS and computed as integers, which is exact on every platform."""


@dataclass(frozen=True)
class RowWeights:
    """Number of `rows` and `weights` of each file, in the order of the prompt set.

    In E epochs a row of weight w is drawn floor(w E) or ceil(w E) times, and a file of n rows floor(n w E) times in
    total. The rows with the additional draw depend only on `seed`, so an epoch needs no state.
    """

    rows: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

    def counts(self, epoch: int) -> np.ndarray:
        """Return the number of draws of each row in an epoch: int64 [N]."""
        counts = [
            self._counts_of_file(file, num_rows, weight, epoch)
            for file, (num_rows, weight) in enumerate(zip(self.rows, self.weights, strict=True))
        ]
        return np.concatenate(counts)

    def identity(self) -> list[list[float]]:
        """Return the values that must be equal in a resumed run, for the checkpoint."""
        return [[rows, weight] for rows, weight in zip(self.rows, self.weights, strict=True)]

    def _counts_of_file(self, file: int, num_rows: int, weight: float, epoch: int) -> np.ndarray:
        """Return floor(w (epoch + 1) + phase) - floor(w epoch + phase) per row, with phases k / n in random order.

        By Hermite's identity the sum over rows is floor(n w (epoch + 1)) - floor(n w epoch).
        """
        whole, part = divmod(max(round(weight * _PARTS), 1), _PARTS)
        if not part or not num_rows:
            return np.full(num_rows, whole, np.int64)
        # The final 1 makes this stream differ from the streams of (seed, epoch): SeedSequence ignores trailing zeros.
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, file, 1])).random_raw(num_rows)
        phases = np.argsort(np.argsort(bits, kind="stable"), kind="stable").astype(np.int64) * _PARTS
        # Only the fractional part of w * epoch matters; the modulo keeps the products within 64 bits.
        before = epoch * part % _PARTS * num_rows
        whole_parts = _PARTS * num_rows
        return whole + (before + part * num_rows + phases) // whole_parts - (before + phases) // whole_parts
