"""Engine that consists of ranks: weight updates of all ranks, sleep and wake-up."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

from mcore_rl.engines.settings import EngineSettings
from mcore_rl.engines.stepped_engine import SteppedEngine
from mcore_rl.errors import WeightSyncError
from mcore_rl.types import DeviceMemory, DraftCounts
from mcore_rl.weights.connection import Connection
from mcore_rl.weights.transports.topology import Endpoint
from mcore_rl.weights.verify import Comparison


class AllRanks(Protocol):
    """Ranks of one engine."""

    def call(self, method: str, *args: object) -> list[Any]:
        """Call a method on all ranks. Returns the results by rank."""


class RankEngine(SteppedEngine):
    """SteppedEngine whose model runs on ranks, which receive weight updates and can sleep.

    The ranks of every engine have the methods of RankMemory. Lists are ordered by rank.
    """

    _ranks: AllRanks
    _draft_counts: DraftCounts | None = None
    _asleep: frozenset[str] = frozenset()
    """Parts that are asleep: "weights", "kv_cache"."""
    _holds_frozen = False
    """True after a complete update from round 0 on, until the engine sleeps without its weights."""
    _is_whole = False
    """True if the update in progress began at round 0."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings.rollout_config, captures_routing=settings.capture_routing, decode=settings.decode)
        self._settings = settings
        # Otherwise the weights are random until the first update.
        self.weights_complete = settings.load_weights

    @property
    def can_generate(self) -> bool:
        """True if the engine is awake with complete weights."""
        return self.weights_complete and not self._asleep

    @property
    def draft_counts(self) -> DraftCounts | None:
        """Draft tokens since the engine's start; None without rollout.draft."""
        return self._draft_counts

    @abstractmethod
    def shutdown(self) -> None:
        """End the ranks."""

    def endpoints(self) -> list[Endpoint]:
        """Return the location of each engine rank."""
        return self._ranks.call("endpoint")

    def device_memory(self) -> list[DeviceMemory | None]:
        """Measure the memory of each rank's GPU; None for a rank on a CPU."""
        return self._ranks.call("device_memory")

    def connect(self, connection: Connection, engine: int) -> None:
        """Join the weight sync as engine number `engine`, before the first update or again after a failed one.

        Collective: all processes of the sync.
        Raises: PeerLostError; WeightSyncError if the engine's tensors differ from the planned ones.
        """
        first_rank = engine * connection.plan.topology.ranks_per_engine
        self._ranks.call("connect_weights", connection, first_rank)

    def disconnect(self) -> None:
        """Leave the weight sync: unmap the staging buffers of all ranks, so that their owners may free them."""
        self._ranks.call("disconnect_weights")

    def fetch_update(self, first_round: int = 0) -> None:
        """Begin to fetch the files of the next update into the memory of all ranks, before `begin_update`."""
        self._ranks.call("fetch_update", first_round)

    def is_fetched(self) -> bool:
        """Return whether these files have arrived on all ranks.

        Raises: PeerLostError; StorageError, WeightSyncError naming a file.
        """
        return all(self._ranks.call("is_fetched"))

    def begin_update(self, first_round: int = 0) -> None:
        """Begin an update; an unfinished one is discarded. The next step after it first returns the results of a pass
        that was in flight, with the version of the earlier weights.

        first_round: 0, or SyncPlan.first_trained_round if the engine holds the frozen weights, which the update lacks
        then. It holds them after a complete update from round 0 on, until it sleeps without its weights or another
        update from round 0 begins.

        Raises: WeightSyncError if the engine lacks the frozen weights.
        """
        if first_round and not self._holds_frozen:
            raise WeightSyncError(f"the update begins at round {first_round}, but the engine lacks the frozen weights")
        self.weights_complete, self._is_whole = False, not first_round
        # An interrupted whole update may have replaced some of the frozen weights.
        self._holds_frozen &= not self._is_whole
        self._ranks.call("begin_update", first_round)

    def receive_bucket(self, sync_round: int) -> list[int]:
        """Receive and load one round of the plan, in order. Returns its bytes as the acknowledgement.

        Raises: PeerLostError, WeightSyncError. After an error the engine must not generate until an update is complete.
        """
        return self._ranks.call("receive_bucket", sync_round)

    def finish_update(self, version: int, *, recompute: bool = False) -> None:
        """Make the update visible and set weight_version to `version`. Requests that start later use no state computed
        with older weights. Requests in flight keep their KV cache; with `recompute` it is computed again.

        Raises: WeightSyncError if a tensor of the model was not received.
        """
        self._ranks.call("finish_update")
        self._holds_frozen |= self._is_whole
        earlier = self.weight_version
        # Set before the reset, which may submit requests again: they must run with the new version.
        self.weight_version, self.weights_complete = version, True
        try:
            self._reset_prefix_cache(recompute)
        except BaseException:
            # The cache may contain entries of earlier weights, so only another complete update makes it usable.
            self.weight_version, self.weights_complete = earlier, False
            raise

    def compare(self) -> list[Comparison]:
        """Compare digests of the tensors that the engine uses with digests that the trainer ranks send meanwhile."""
        self._require_complete()
        return self._ranks.call("compare_weights")

    def sleep(self, *, keep_weights: bool) -> int:
        """Implement ports.Engine.sleep."""
        if self.num_running:
            raise RuntimeError(f"the engine cannot sleep while {self.num_running} requests are running")
        if "weights" in self._asleep:
            return 0
        self._holds_frozen &= keep_weights
        released = self._release(keep_weights=keep_weights)
        self._asleep = frozenset({"weights", "kv_cache"})
        return released

    def wake_up(self, part: str) -> None:
        """Implement ports.Engine.wake_up."""
        if part in self._asleep:
            self._restore(part)
            self._asleep -= {part}

    def _release(self, *, keep_weights: bool) -> int:
        """Free memory. Returns its bytes. On CPU only the KV cache is freed: kernels hold the weights, packed."""
        self._reset_prefix_cache(False)
        # After a weight sync only the weights are awake, and the KV cache is freed already.
        return 0 if "kv_cache" in self._asleep else sum(self._ranks.call("release_kv_cache"))

    def _restore(self, part: str) -> None:
        if part == "kv_cache":
            self._ranks.call("restore_kv_cache")

    def _require_awake(self) -> None:
        if self._asleep:
            raise RuntimeError(f"the engine is asleep ({', '.join(sorted(self._asleep))}); call wake_up() first")

    @abstractmethod
    def _empty_prefix_cache(self, recompute: bool) -> bool:
        """Empty the prefix cache; with `recompute`, also if requests are running. Returns whether it is empty."""

    def _reset_prefix_cache(self, recompute: bool) -> None:
        """Prevent new requests from using KV cache of earlier weights.

        With `recompute`, running requests compute their KV cache again; otherwise requests that have sampled a token
        keep theirs, and all others start again.

        Raises: WeightSyncError if the engine does not reset its cache.
        """
        if self._empty_prefix_cache(recompute):
            return
        if recompute or not self.num_running:
            raise WeightSyncError("the engine did not reset its prefix cache, which belongs to the previous weights")
        # Running requests keep their cache. New requests cannot hit it: their salt contains the new version.
        self._resubmit_unstarted()
