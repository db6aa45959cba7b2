"""Numbers per trained token of some samples, as one array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenColumn:
    """One number per trained token of some samples, such as a critic's values; lives in the object store.

    Shapes: samples int64 [b] indices into the Batch; offsets int64 [b + 1]; values float32 [offsets[-1]].
    """

    samples: np.ndarray
    offsets: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, by_sample: Mapping[int, np.ndarray]) -> TokenColumn:
        """Concatenate the arrays of all samples. Shapes: [n] each."""
        # dict order: sample i of `samples` has the values between offsets i and i + 1.
        offsets = np.zeros(len(by_sample) + 1, np.int64)
        np.cumsum([len(part) for part in by_sample.values()], out=offsets[1:])
        # The empty array gives the type if there is no sample.
        values = np.concatenate([np.empty(0, np.float32), *by_sample.values()]).astype(np.float32, copy=False)
        return cls(np.fromiter(by_sample, np.int64, len(by_sample)), offsets, values)

    def by_sample(self) -> dict[int, np.ndarray]:
        """Split into one array per sample. Shapes: float32 [n]."""
        # np.split returns one part even if there is no sample.
        parts = np.split(self.values, self.offsets[1:-1]) if len(self.samples) else []
        return dict(zip(self.samples.tolist(), parts, strict=True))
