"""Memory of one engine rank: weights, which receive updates, and the KV cache, which is freed during sleep."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from mcore_rl.engines.kept_slices import SliceLoader, kept_boxes, unstacked
from mcore_rl.errors import WeightSyncError
from mcore_rl.processes.device_memory import device_memory
from mcore_rl.types import DeviceMemory
from mcore_rl.weights.connection import Connection, connect_engine_rank
from mcore_rl.weights.receive import SliceReceiver
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.shard_map import Boxes
from mcore_rl.weights.slices.stacked_parts import StackedParts, loaded_tensors
from mcore_rl.weights.transports.hosts import this_host
from mcore_rl.weights.transports.nccl_group import nccl_version
from mcore_rl.weights.transports.segments import device_uuid
from mcore_rl.weights.transports.topology import Endpoint
from mcore_rl.weights.verify import Comparison, compare, require_planned


class RankMemory:
    """Base class of every engine's ranks: weight updates, and the memory of the KV cache. `_loader` loads slices into
    the rank's model."""

    rank: int
    _layout: EngineLayout
    _loader: SliceLoader
    _receiver: SliceReceiver
    _boxes: dict[str, Boxes]
    """The parts of each HF tensor that the plan sends to this rank."""
    _freed: list[tuple[torch.UntypedStorage, int]]
    """Storages of the KV cache and their sizes in bytes before they were freed."""

    def endpoint(self) -> Endpoint:
        """Return this rank's endpoint for weight updates."""
        return Endpoint(this_host(), os.environ.get("VLLM_HOST_IP", "127.0.0.1"), device_uuid(), nccl_version())

    def connect_weights(self, connection: Connection, first_rank: int) -> None:
        """Connect to the weight sync and record the parts of tensors that this rank keeps.

        first_rank: number of the engine's first rank among the ranks of all engines.
        Collective: all processes of the sync.
        Raises: WeightSyncError if this rank keeps other parts of tensors than the plan sends.
        """
        plan = connection.plan
        if self._layout != plan.engine_layout:
            raise WeightSyncError(
                f"the engine's layout is {self._layout}, but the sync was planned for {plan.engine_layout}"
            )
        self.disconnect_weights()
        self._receiver = connect_engine_rank(connection, first_rank + self.rank)
        shard_map = plan.shard_map  # of this engine's layout
        boxes = shard_map.boxes(self.rank)
        with self._loader.context():
            kept = unstacked(self._loader.record(loaded_tensors(shard_map)), StackedParts(shard_map.rows))
            require_planned(kept_boxes(kept), boxes, self.rank)
            self._loader.keep(kept, plan.frozen_names)
        self._boxes = boxes

    def disconnect_weights(self) -> None:
        """Unmap the staging buffer, whose owner may free it then, and end the connections. Does nothing without a
        connection.

        Raises: WeightSyncError if views of the buffer still exist.
        """
        if hasattr(self, "_receiver"):
            self._receiver.close()

    def fetch_update(self, first_round: int = 0) -> None:
        """Begin to fetch the next update into host memory, if the transport can; the engine may generate meanwhile."""
        self._receiver.fetch(first_round)

    def is_fetched(self) -> bool:
        """Return whether the update that `fetch_update` began to fetch has arrived."""
        return self._receiver.is_fetched()

    def begin_update(self, first_round: int = 0) -> None:
        """Begin an update. first_round: 0, or SyncPlan.first_trained_round if this rank holds the frozen weights."""
        self._receiver.begin(first_round)
        with self._loader.context():
            self._loader.begin(whole=not first_round)

    def receive_bucket(self, sync_round: int) -> int:
        """Receive and load one round of the plan. Returns its bytes."""
        with self._loader.context():
            return self._receiver.receive(sync_round, self._loader.put)

    def finish_update(self) -> None:
        """Finish the update, and return its temporary memory to the device.

        Raises: WeightSyncError if a part that this rank keeps was not received.
        """
        self._receiver.finish()
        with self._loader.context():
            self._loader.finish()
        if torch.cuda.is_available():
            # The KV cache wakes up next. Its memory does not come from torch's allocator, which still holds the
            # temporary tensors of the update: 0.7 GB for a layer of DeepSeek-V3 on 32 ranks.
            torch.cuda.empty_cache()

    def device_memory(self) -> DeviceMemory | None:
        """Measure the memory of this rank's GPU; None on a CPU."""
        return device_memory()

    def compare_weights(self) -> Comparison:
        """Compare the weights of this rank's kernels with the trainer's digests, one module at a time."""
        expected = self._receiver.digests()
        with self._loader.context():
            return compare(expected, self._loader.held(self._boxes), self._boxes)

    def release_kv_cache(self) -> int:
        """Free the memory of the KV cache but keep its tensors, to which the engine holds references. Returns the freed
        bytes."""
        # Tensors may share a storage.
        storages = {storage._cdata: storage for storage in (cache.untyped_storage() for cache in self._kv_caches())}
        self._freed = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._freed:
            storage.resize_(0)
        return sum(num_bytes for _, num_bytes in self._freed)

    def restore_kv_cache(self) -> None:
        """Allocate the memory again, filled with zeros like an engine's new cache.

        Attention multiplies masked values too, so they must not be NaN.
        """
        for storage, num_bytes in self._freed:
            storage.resize_(num_bytes)
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()

    def _kv_caches(self) -> Iterable[torch.Tensor]:
        """Return the tensors of the KV cache."""
        raise NotImplementedError
