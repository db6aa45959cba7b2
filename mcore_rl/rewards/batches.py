"""Responses that are graded together, gathered until all of them have come."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from mcore_rl.rewards.functions import Sample


@dataclass
class _Batch:
    keys: list[int]
    """Of all its responses, in their order."""
    samples: dict[int, Sample] = field(default_factory=dict)

    def whole(self) -> dict[int, Sample] | None:
        if len(self.samples) < len(self.keys):
            return None
        return {key: self.samples[key] for key in self.keys}


class Batches:
    """Any thread may call it. They return what is whole, and forget it: samples by key, in the batch's order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[int, _Batch] = {}
        """By the keys of their responses."""

    def add(self, key: int, sample: Sample, members: Collection[int]) -> dict[int, Sample] | None:
        """Takes a response; its batch, where it was the last. members: keys of the batch, its own among them; the first
        response of a batch says them."""
        with self._lock:
            if key not in self._batches:
                batch = _Batch(list(members))
                if key not in batch.keys:
                    raise ValueError(f"key {key} is not among those of its batch, {batch.keys[:8]}")
                self._batches |= dict.fromkeys(batch.keys, batch)
            self._batches[key].samples[key] = sample
            return self._taken(self._batches[key])

    def withdraw(self, key: int, members: Collection[int]) -> dict[int, Sample] | None:
        """The response will not come; its batch, where nothing else of it was awaited."""
        with self._lock:
            if key not in self._batches:
                self._batches |= dict.fromkeys(members, _Batch(list(members)))
            batch = self._batches.pop(key)
            batch.keys.remove(key)
            return self._taken(batch) or None

    def _taken(self, batch: _Batch) -> dict[int, Sample] | None:
        whole = batch.whole()
        for key in whole or ():
            del self._batches[key]
        return whole
