"""WeightReceiver of an engine: forwards every call to all ranks and tracks whether an update is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from mcore_rl.errors import WeightSyncError
from mcore_rl.ports import WeightReceiver
from mcore_rl.weights.connection import Connection
from mcore_rl.weights.transports.topology import Endpoint
from mcore_rl.weights.verify import Comparison


class RankCalls(Protocol):
    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all ranks. Returns the results by rank."""


class ResetPrefixCache(Protocol):
    def __call__(self, *, recompute: bool) -> None: ...


class RanksReceiver:
    """Implements ports.WeightReceiver on the ranks of an engine.

    ranks: calls the same methods on the ranks of every engine (`endpoint`, `connect_weights`, `begin_update`, ...).
    reset_prefix_cache: called after an update, see VllmEngine._reset_prefix_cache.
    """

    def __init__(self, ranks: RankCalls, reset_prefix_cache: ResetPrefixCache) -> None:
        self.version = 0
        self._ranks = ranks
        self._reset_prefix_cache = reset_prefix_cache
        self._complete = True

    def endpoints(self) -> list[Endpoint]:
        return self._ranks.call("endpoint")

    def connect(self, connection: Connection, engine: int) -> None:
        first_rank = engine * connection.plan.topology.ranks_per_engine
        self._ranks.call("connect_weights", connection, first_rank)

    def begin_update(self) -> None:
        self._complete = False
        self._ranks.call("begin_update")

    def receive_bucket(self, sync_round: int) -> list[int]:
        return self._ranks.call("receive_bucket", sync_round)

    def finish_update(self, version: int, *, recompute: bool = False) -> None:
        self._ranks.call("finish_update")
        earlier = self.version
        # Set before the reset, which may submit requests again: they must run with the new version.
        self.version, self._complete = version, True
        try:
            self._reset_prefix_cache(recompute=recompute)
        except BaseException:
            # The cache may contain entries of earlier weights, so only another complete update makes it usable.
            self.version, self._complete = earlier, False
            raise

    def compare(self) -> list[Comparison]:
        self.require_complete()
        return self._ranks.call("compare_weights")

    def require_complete(self) -> None:
        """Raise WeightSyncError if an update was begun and no update has been completed since."""
        if not self._complete:
            raise WeightSyncError(
                f"the engine holds a part of the update after version {self.version}; it is usable "
                "only after a complete update"
            )


if TYPE_CHECKING:
    _port: type[WeightReceiver[Endpoint, Connection, Comparison]] = RanksReceiver
