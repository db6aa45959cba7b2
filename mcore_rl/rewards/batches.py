"""Collection of responses into the batches that a batch reward function grades in one call."""

from __future__ import annotations

import threading
from collections.abc import Collection

from mcore_rl.rewards.functions import Sample


class Batches:
    """Incomplete batches. Thread-safe.

    `add` and `withdraw` return a batch that they complete, as {key: sample} in the batch's order, and drop it here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[int, dict[int, Sample | None]] = {}
        """Batch of each response key: all of its keys in order, None for missing responses."""

    def add(self, key: int, sample: Sample, members: Collection[int]) -> dict[int, Sample] | None:
        """Add a response; returns its batch if that is now complete.

        members: all keys of the batch, including `key`. Only the value given with the batch's first response counts.
        """
        with self._lock:
            batch = self._batch_of(key, members)
            batch[key] = sample
            return self._completed(batch)

    def withdraw(self, key: int, members: Collection[int]) -> dict[int, Sample] | None:
        """Remove a response that will not be submitted; returns its batch if that is now complete."""
        with self._lock:
            batch = self._batch_of(key, members)
            del batch[key], self._batches[key]
            return self._completed(batch) or None  # an empty batch, after all responses were withdrawn, is not graded

    def _batch_of(self, key: int, members: Collection[int]) -> dict[int, Sample | None]:
        if key not in self._batches:  # this is the first response of the batch
            if key not in members:
                raise ValueError(f"key {key} is not in its batch, which has the keys {list(members)[:8]}")
            self._batches |= dict.fromkeys(members, dict.fromkeys(members))
        return self._batches[key]

    def _completed(self, batch: dict[int, Sample | None]) -> dict[int, Sample] | None:
        whole = {key: sample for key, sample in batch.items() if sample is not None}
        if len(whole) < len(batch):
            return None
        for key in whole:
            del self._batches[key]
        return whole
