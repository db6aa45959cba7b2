"""The WeightReceiver of a vLLM engine: all its ranks get an update, and each takes its part of every tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mcore_rl.engines.vllm.ranks import EngineRanks
from mcore_rl.errors import WeightSyncError
from mcore_rl.ports import WeightReceiver
from mcore_rl.weights.plan import BucketSpec
from mcore_rl.weights.verify import digest


class VllmReceiver:
    """`reset_prefix_cache` forgets what the engine has computed with earlier weights."""

    def __init__(self, ranks: EngineRanks, reset_prefix_cache: Callable[[], None]) -> None:
        self.version = 0
        self._ranks = ranks
        self._reset_prefix_cache = reset_prefix_cache
        self._whole = True

    def attach(self, spec: BucketSpec) -> None:
        """Maps the shared weight buckets in every engine rank."""
        self._ranks.call("attach", spec)

    def begin_update(self) -> None:
        """Begins an update, or another in the place of one that was not finished."""
        self._whole = False
        self._ranks.call("begin_update")

    def receive_bucket(self, index: int) -> int:
        """Loads bucket `index`; returns its bytes once every engine rank has loaded it.

        Raises: WeightSyncError when a rank took another number of bytes, or the bucket came out of turn.
        """
        loaded = self._ranks.call("receive_bucket", index)
        if len(set(loaded)) != 1:
            raise WeightSyncError(f"engine ranks acknowledged different bytes of bucket {index}: {loaded}")
        return int(loaded[0])

    def finish_update(self, version: int) -> None:
        """Makes the update visible.

        Raises: WeightSyncError when a bucket or a parameter is missing.
        """
        self._ranks.call("finish_update")
        self._reset_prefix_cache()
        self.version = version
        self._whole = True

    def checksums(self) -> dict[str, str]:
        """Digests of what the kernels compute with, read back one module at a time."""
        self.require_whole()
        digests: dict[str, str] = {}
        for module in self._ranks.call("held_weight_modules")[0]:
            shards: dict[str, list[Any]] = {}
            for held in self._ranks.call("held_weights", module):
                for shard in held:
                    shards.setdefault(shard.name, []).append(shard)
            for name, of_ranks in shards.items():
                for whole in _joined(of_ranks):
                    found = digest(whole)
                    # A tied tensor is held twice, others by every rank; none may hide one that differs.
                    digests[name] = found if digests.get(name, found) == found else "copies differ"
        return digests

    def require_whole(self) -> None:
        """Raises: WeightSyncError between the begin of an update and the end of one that came whole."""
        if not self._whole:
            raise WeightSyncError(
                f"the engine holds a part of the update after version {self.version}: only a whole one makes it usable"
            )


def _joined(shards: Sequence[Any]) -> list[torch.Tensor]:
    """An HF tensor from the shards of the engine ranks that have any (held_weights.HeldTensor), once for every copy."""
    first = shards[0]
    if first.dim is None:
        return [shard.tensor for shard in shards]
    copies = [shards[copy :: first.replicas] for copy in range(first.replicas)]
    return [torch.cat([shard.tensor for shard in copy], dim=first.dim) for copy in copies]


if TYPE_CHECKING:
    _port: type[WeightReceiver[BucketSpec]] = VllmReceiver
