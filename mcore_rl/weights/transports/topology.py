"""In which memory each engine rank's weights arrive, and which trainer ranks can write there: a pure function of where
the processes run.

    an engine rank whose memory a trainer rank shares   a window that both map; who is elsewhere sends to its `home`
    any other                                           memory of its own, into which every trainer rank sends
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mcore_rl.errors import ConfigError
from mcore_rl.weights.slices.routes import Places
from mcore_rl.weights.transports.hosts import Host


@dataclass(frozen=True)
class Endpoint:
    """Where a process of a sync runs, and the address at which others reach it."""

    host: Host
    address: str


@dataclass(frozen=True)
class Window:
    """Where the buckets of `readers` arrive: engine ranks (counted through all engines) that take the same of each.

    `writers` are the trainer ranks that map it; `home` is the one of them that makes it, and receives for it what
    others send. Without any, it is memory of its only reader.
    """

    readers: tuple[int, ...]
    writers: tuple[int, ...] = ()
    home: int | None = None


@dataclass(frozen=True)
class Topology:
    """All trainer ranks, and all engine ranks, engine by engine."""

    trainers: tuple[Endpoint, ...]
    engines: tuple[Endpoint, ...]
    ranks_per_engine: int
    transport: str = "auto"
    """weights.transport: shared_memory insists on windows that trainer ranks map, network on none."""

    @cached_property
    def windows(self) -> list[Window]:
        """Of the first engine rank by rank, then of the next that arrives elsewhere.

        Raises: ConfigError where the transport asks for memory that is not shared.
        """
        windows = []
        homes: dict[tuple[str, int], int] = {}
        for engines in self._engines_alike():
            for rank in range(self.ranks_per_engine):
                readers = tuple(engine * self.ranks_per_engine + rank for engine in engines)
                where = self.engines[readers[0]]
                writers = self._writers(where)
                home = None
                if writers:
                    # The homes of a host's windows take turns.
                    turn = homes[where.host.memory] = homes.get(where.host.memory, -1) + 1
                    home = writers[turn % len(writers)]
                windows.append(Window(readers, writers, home))
        return windows

    @property
    def places(self) -> Places:
        """Of trainer ranks, and of windows in the place of engine ranks."""
        hosts: dict[tuple[str, int], int] = {}
        for endpoint in (*self.trainers, *self.engines):
            hosts.setdefault(endpoint.host.memory, len(hosts))
        trainers = [(hosts[endpoint.host.memory], -1) for endpoint in self.trainers]
        windows = [(hosts[self.engines[window.readers[0]].host.memory], -1) for window in self.windows]
        return Places.of(trainers, windows)

    def window_of(self, engine_rank: int) -> int:
        return next(number for number, window in enumerate(self.windows) if engine_rank in window.readers)

    def member(self, engine_rank: int) -> int:
        """Number of an engine rank in the transfer group, in which the trainer ranks come first."""
        return len(self.trainers) + engine_rank

    def name(self, member: int) -> str:
        """Of a member of the transfer group, for messages."""
        if member < len(self.trainers):
            return f"trainer rank {member} on {self.trainers[member].host.name}"
        engine, rank = divmod(member - len(self.trainers), self.ranks_per_engine)
        of = f", rank {rank}" if self.ranks_per_engine > 1 else ""
        return f"rollout engine {engine}{of} on {self.engines[member - len(self.trainers)].host.name}"

    @cached_property
    def _trainers_by_memory(self) -> dict[tuple[str, int], tuple[int, ...]]:
        ranks: dict[tuple[str, int], tuple[int, ...]] = {}
        for rank, trainer in enumerate(self.trainers):
            ranks[trainer.host.memory] = (*ranks.get(trainer.host.memory, ()), rank)
        return ranks

    def _writers(self, where: Endpoint) -> tuple[int, ...]:
        if self.transport == "network":
            return ()
        writers = self._trainers_by_memory.get(where.host.memory, ())
        if self.transport == "shared_memory" and not writers:
            raise ConfigError(
                f"weights.transport=shared_memory: no trainer rank shares memory with the engine ranks on "
                f"{where.host.name}; set it to auto or network"
            )
        return writers

    def _engines_alike(self) -> list[list[int]]:
        """Engines whose ranks read the same windows: on the same hosts, rank by rank, all shared with trainers."""
        size = self.ranks_per_engine
        alike: dict[object, list[int]] = {}
        for engine in range(len(self.engines) // size):
            ranks: Sequence[Endpoint] = self.engines[engine * size : (engine + 1) * size]
            mapped = all(self._writers(where) for where in ranks)
            key = tuple(where.host.memory for where in ranks) if mapped else engine
            alike.setdefault(key, []).append(engine)
        return list(alike.values())
