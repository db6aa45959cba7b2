"""The WeightReceiver of a vLLM engine: all its ranks get an update, and each takes its part of every tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mcore_rl.engines.vllm.ranks import EngineRanks
from mcore_rl.errors import WeightSyncError
from mcore_rl.ports import WeightReceiver
from mcore_rl.weights.connection import Connection
from mcore_rl.weights.transports.topology import Endpoint
from mcore_rl.weights.verify import Comparison


class VllmReceiver:
    """`reset_prefix_cache` forgets what the engine has computed with earlier weights."""

    def __init__(self, ranks: EngineRanks, reset_prefix_cache: Callable[[], None]) -> None:
        self.version = 0
        self._ranks = ranks
        self._reset_prefix_cache = reset_prefix_cache
        self._whole = True

    def endpoints(self) -> list[Endpoint]:
        return self._ranks.call("endpoint")

    def connect(self, connection: Connection, engine: int) -> None:
        first_rank = engine * connection.plan.topology.ranks_per_engine
        self._ranks.call("connect_weights", connection, first_rank)

    def begin_update(self) -> None:
        self._whole = False
        self._ranks.call("begin_update")

    def receive_bucket(self, turn: int) -> list[int]:
        return self._ranks.call("receive_bucket", turn)

    def finish_update(self, version: int) -> None:
        self._ranks.call("finish_update")
        self._reset_prefix_cache()
        self.version = version
        self._whole = True

    def compare(self) -> list[Comparison]:
        self.require_whole()
        return self._ranks.call("compare_weights")

    def require_whole(self) -> None:
        """Raises: WeightSyncError between the begin of an update and the end of one that came whole."""
        if not self._whole:
            raise WeightSyncError(
                f"the engine holds a part of the update after version {self.version}: only a whole one makes it usable"
            )


if TYPE_CHECKING:
    _port: type[WeightReceiver[Endpoint, Connection, Comparison]] = VllmReceiver
