"""The WeightReceiver of an engine: all its ranks get an update, and each takes its part of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from mcore_rl.errors import WeightSyncError
from mcore_rl.ports import WeightReceiver
from mcore_rl.weights.connection import Connection
from mcore_rl.weights.transports.topology import Endpoint
from mcore_rl.weights.verify import Comparison


class Ranks(Protocol):
    def call(self, method: str, *args: Any) -> list[Any]:
        """Results by rank."""


class ForgetPrefixes(Protocol):
    def __call__(self, *, recompute: bool) -> None: ...


class RanksReceiver:
    """`ranks` are called with names of methods that every engine's ranks have; `forget_prefixes` as VllmEngine's."""

    def __init__(self, ranks: Ranks, forget_prefixes: ForgetPrefixes) -> None:
        self.version = 0
        self._ranks = ranks
        self._forget_prefixes = forget_prefixes
        self._whole = True

    def endpoints(self) -> list[Endpoint]:
        return self._ranks.call("endpoint")

    def connect(self, connection: Connection, engine: int) -> None:
        first_rank = engine * connection.plan.topology.ranks_per_engine
        self._ranks.call("connect_weights", connection, first_rank)

    def pull_from(self, payload: Mapping[str, Any], engine: int, num_engines: int) -> None:
        """As WeightReceiverExtension.pull_from."""
        self._ranks.call("pull_from", payload, engine, num_engines)

    def begin_update(self) -> None:
        self._whole = False
        self._ranks.call("begin_update")

    def receive_bucket(self, turn: int) -> list[int]:
        return self._ranks.call("receive_bucket", turn)

    def finish_update(self, version: int, *, recompute: bool = False) -> None:
        self._ranks.call("finish_update")
        earlier = self.version
        self.version, self._whole = version, True  # requests that come again are of the new weights
        try:
            self._forget_prefixes(recompute=recompute)
        except BaseException:
            self.version, self._whole = earlier, False
            raise

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
    _port: type[WeightReceiver[Endpoint, Connection, Comparison]] = RanksReceiver
