"""The engine's side, independent of the engine: which tensors a bucket brings, and when their memory may change.

States of a receiver:

    attached --begin--> updating --receive(0) ... receive(last)--> updating --finish--> attached
                           |  anything out of order, or an error while loading
                           v
                        broken       (the engine holds half an update: it must not generate again)

Mapped: the whole plan lies in the shared memory until the update ends, so tensors are views of it. Staged: a slot is
written anew soon after it was acknowledged, so tensors are copied into an arena that one group (a layer) fills; the
next group reuses it. Engines keep references until a layer is complete; `before_reuse` lets them let go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.plan import BucketEntry, aligned, row_bytes
from mcore_rl.weights.transports.shared_memory import SharedBuckets

NamedTensors = list[tuple[str, torch.Tensor]]


class BucketReceiver:
    """Hands out the tensors of one update, bucket after bucket.

    before_reuse(arena) is called before memory of tensors handed out earlier in this update, all inside `arena`,
    changes.
    """

    def __init__(self, buckets: SharedBuckets, before_reuse: Callable[[torch.Tensor], None]) -> None:
        self._buckets = buckets
        self._spec = buckets.spec
        self._before_reuse = before_reuse
        self._state = "attached"
        self._next = 0
        self._arena: torch.Tensor | None = None
        self._arena_used = 0
        self._group: str | None = None
        self._partial: torch.Tensor | None = None

    def detach(self) -> None:
        """Lets go of all memory; the receiver is of no further use.

        Raises: WeightSyncError in the middle of an update.
        """
        self._expect("attached", "detach")
        self._state = "detached"
        self._arena = None

    def begin(self) -> None:
        self._expect("attached", "begin")
        self._state = "updating"
        self._next = 0
        self._arena_used = 0
        self._group = None
        self._partial = None

    def receive(self, index: int, load: Callable[[NamedTensors], None]) -> int:
        """Passes the tensors that bucket `index` completes to `load`, group by group; returns the bucket's bytes as
        the acknowledgement.

        Raises: WeightSyncError when it is not this bucket's turn.
        """
        self._expect("updating", f"bucket {index}")
        with self._broken_on_error():
            if index != self._next:
                raise WeightSyncError(f"bucket {index} came where bucket {self._next} was due")
            for tensors in self._mapped(index) if self._spec.mapped else self._staged(index):
                load(tensors)
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

    def _mapped(self, index: int) -> Iterator[NamedTensors]:
        yield [(entry.name, self._buckets.view(index, entry)) for entry in self._spec.buckets[index]]

    def _staged(self, index: int) -> Iterator[NamedTensors]:
        ready: NamedTensors = []
        for entry in self._spec.buckets[index]:
            if entry.group != self._group:
                if ready:
                    yield ready
                    ready = []
                self._enter(entry.group)
            if entry.first_row == 0:
                self._partial = self._allocate(entry)
            assert self._partial is not None  # entries of one tensor follow each other, first rows first
            view = self._buckets.view(index, entry)
            target = self._partial.narrow(0, entry.first_row, entry.num_rows) if entry.shape else self._partial
            target.copy_(view)
            if entry.last:
                ready.append((entry.name, self._partial))
                self._partial = None
        if ready:
            yield ready

    def _enter(self, group: str) -> None:
        if self._arena is not None:
            self._before_reuse(self._arena)
        self._group = group
        self._arena_used = 0

    def _allocate(self, entry: BucketEntry) -> torch.Tensor:
        if self._arena is None:
            # Zeroed, not empty: the pages must exist before the first copy.
            self._arena = torch.zeros(max(self._spec.group_bytes().values()), dtype=torch.uint8)
        size = (entry.shape[0] if entry.shape else 1) * row_bytes(entry.shape, entry.dtype)
        start = self._arena_used
        self._arena_used += aligned(size)
        return self._arena[start : start + size].view(entry.dtype).view(entry.shape)

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
