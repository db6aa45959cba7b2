"""Coordinates a weight sync: the driver moves no bytes, it says who writes and who reads, and counts what arrived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_rl.errors import WeightSyncError
from mcore_rl.ports import Publisher
from mcore_rl.runtime.roles.engine import EnginePool
from mcore_rl.runtime.roles.trainer import TrainerGroup
from mcore_rl.weights.plan import BucketSpec
from mcore_rl.weights.transports.shared_memory import SharedBuckets
from mcore_rl.weights.verify import compare


@dataclass
class SharedMemoryPublisher:
    """Publishes through one ring of shared-memory buckets per host.

    Writing bucket k + 1 overlaps with reading bucket k; a slot is written again only after every engine has
    acknowledged what it held.
    """

    trainers: TrainerGroup
    engines: EnginePool
    spec: BucketSpec
    writers: list[list[int]]
    """writers[bucket]: the ranks that hold a part of it."""

    @classmethod
    def connect(
        cls,
        trainers: TrainerGroup,
        engines: EnginePool,
        *,
        bucket_bytes: int,
        num_slots: int,
    ) -> SharedMemoryPublisher:
        """Plans the buckets, creates the segment, maps it everywhere and removes its name at once, so that no
        crash can leave it behind."""
        watch = trainers.watch
        plan: BucketSpec = watch.get([handle.sync_plan.remote(bucket_bytes, num_slots) for handle in trainers.handles])[
            0
        ]
        segment = SharedBuckets.create(plan)
        try:
            written = watch.get([handle.attach_buckets.remote(segment.spec) for handle in trainers.handles])
            engines.call("attach", segment.spec)
        finally:
            segment.unlink()
            segment.close()
        writers: list[list[int]] = [[] for _ in range(plan.num_buckets)]
        for rank, buckets in enumerate(written):
            for bucket in buckets:
                writers[bucket].append(rank)
        return cls(trainers, engines, segment.spec, writers)

    def publish(self, version: int) -> int:
        """Hands every tensor to every engine; returns `version` when all have acknowledged the last bucket.

        Raises: WeightSyncError when a bucket was written or read incompletely.
        """
        # An engine runs its calls in their order, so none is waited for before the next is on its way.
        calls = self.engines.send("begin_update")
        receiving: list[list[Any]] = []
        for bucket in range(self.spec.num_buckets):
            if bucket >= self.spec.num_slots:  # the slot's previous bucket must have been read
                self._acknowledge(bucket - self.spec.num_slots, receiving)
            self._write(bucket)
            receiving.append(self.engines.send("receive_bucket", bucket))
        calls += self.engines.send("finish_update", version)
        for bucket in range(max(0, len(receiving) - self.spec.num_slots), len(receiving)):
            self._acknowledge(bucket, receiving)
        self.trainers.watch.get(calls)
        return version

    def verify(self) -> int:
        """Compares what every engine computes with to what the trainers hold; returns the number of tensors compared.

        The trainers' tensors go through the buckets once more, where rank 0 digests them whole.
        Raises: WeightSyncError listing the tensors that differ.
        """
        watch, reader = self.trainers.watch, self.trainers.handles[0]
        for bucket in range(self.spec.num_buckets):
            self._write(bucket)
            watch.get([reader.digest_bucket.remote(bucket)])
        held_by_trainers = watch.get([reader.bucket_digests.remote()])[0]
        compared = 0
        for engine, digests in enumerate(self.engines.call("checksums")):
            compared += compare(held_by_trainers, digests, f"engine {engine}")
        return compared

    def _write(self, bucket: int) -> None:
        ranks = self.writers[bucket]
        written = self.trainers.watch.get([self.trainers.handles[rank].write_bucket.remote(bucket) for rank in ranks])
        if sum(written) != self.spec.bucket_bytes(bucket):
            raise WeightSyncError(
                f"bucket {bucket}: ranks {ranks} wrote {sum(written)} of {self.spec.bucket_bytes(bucket)} bytes"
            )

    def _acknowledge(self, bucket: int, receiving: list[list[Any]]) -> None:
        expected = self.spec.bucket_bytes(bucket)
        for engine, received in enumerate(self.trainers.watch.get(receiving[bucket])):
            if received != expected:
                raise WeightSyncError(f"bucket {bucket}: engine {engine} acknowledged {received} of {expected} bytes")


if TYPE_CHECKING:
    _port: type[Publisher] = SharedMemoryPublisher
