"""Collection of responses into the batches that a batch reward function grades in one call."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from mcore_rl.rewards.functions import Sample


@dataclass
class _Batch:
    keys: list[int]
    """Keys of all responses of the batch, in order."""
    samples: dict[int, Sample] = field(default_factory=dict)

    def whole(self) -> dict[int, Sample] | None:
        """Return the samples in the batch's order; None while some are missing."""
        if len(self.samples) < len(self.keys):
            return None
        return {key: self.samples[key] for key in self.keys}


class Batches:
    """Incomplete batches. Thread-safe.

    `add` and `withdraw` return a batch that they complete, as {key: sample} in the batch's order, and drop it here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[int, _Batch] = {}
        """Batch of each response key."""

    def add(self, key: int, sample: Sample, members: Collection[int]) -> dict[int, Sample] | None:
        """Add a response; returns its batch if that is now complete.

        members: all keys of the batch, including `key`. Only the value given with the batch's first response counts.
        """
        with self._lock:
            if key not in self._batches:
                batch = _Batch(list(members))
                if key not in batch.keys:
                    raise ValueError(f"key {key} is not in its batch, which has the keys {batch.keys[:8]}")
                self._batches |= dict.fromkeys(batch.keys, batch)
            self._batches[key].samples[key] = sample
            return self._taken(self._batches[key])

    def withdraw(self, key: int, members: Collection[int]) -> dict[int, Sample] | None:
        """Remove a response that will not be submitted; returns its batch if that is now complete."""
        with self._lock:
            if key not in self._batches:  # no response of the batch has been submitted yet
                self._batches |= dict.fromkeys(members, _Batch(list(members)))
            batch = self._batches.pop(key)
            batch.keys.remove(key)
            return self._taken(batch) or None  # an empty batch, after all responses were withdrawn, is not graded

    def _taken(self, batch: _Batch) -> dict[int, Sample] | None:
        whole = batch.whole()
        for key in whole or ():
            del self._batches[key]
        return whole
