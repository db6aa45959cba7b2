"""The engine's side, independent of the engine: which tensors a bucket brings, and in which order buckets come.

States of a receiver:

    attached --begin--> updating --receive(0) ... receive(last)--> updating --finish--> attached
                           |  anything out of order, or an error while loading
                           v
                        broken       (the engine holds half an update: it must not generate again)

A slot is written anew soon after its bucket was acknowledged: what an engine keeps, it copies while it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.transports.shared_memory import SharedBuckets

Put = Callable[[str, tuple[int, ...], torch.Tensor], None]
"""Takes a box of an HF tensor: its name, the indices of the box's first element, and the box."""


class BucketReceiver:
    """Hands out the tensors of one update, bucket after bucket."""

    def __init__(self, buckets: SharedBuckets) -> None:
        self._buckets = buckets
        self._spec = buckets.spec
        self._state = "attached"
        self._next = 0

    def detach(self) -> None:
        """Ends the receiver's use.

        Raises: WeightSyncError in the middle of an update.
        """
        self._expect("attached", "detach")
        self._state = "detached"

    def begin(self) -> None:
        self._expect("attached", "begin")
        self._state = "updating"
        self._next = 0

    def receive(self, index: int, put: Put) -> int:
        """Passes what bucket `index` brings to `put`; returns the bucket's bytes as the acknowledgement.

        Raises: WeightSyncError when it is not this bucket's turn.
        """
        self._expect("updating", f"bucket {index}")
        with self._broken_on_error():
            if index != self._next:
                raise WeightSyncError(f"bucket {index} came where bucket {self._next} was due")
            for entry in self._spec.buckets[index]:
                put(entry.name, entry.start, self._buckets.view(index, entry))
            self._next = index + 1
        return self._spec.bucket_bytes(index)

    def finish(self) -> None:
        """Ends the update; after it, the shared memory may be written again.

        Raises: WeightSyncError when buckets are missing.
        """
        self._expect("updating", "finish")
        with self._broken_on_error():
            if self._next != self._spec.num_buckets:
                raise WeightSyncError(
                    f"the update ended after {self._next} of {self._spec.num_buckets} buckets; "
                    f"bucket {self._next} begins with {self._spec.buckets[self._next][0].name}"
                )
        self._state = "attached"

    def _expect(self, state: str, call: str) -> None:
        if self._state != state:
            raise WeightSyncError(f"{call}: the receiver is {self._state}, not {state}")

    @contextmanager
    def _broken_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._state = "broken"
            raise
