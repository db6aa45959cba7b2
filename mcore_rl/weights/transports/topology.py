"""In which memory each engine rank's weights arrive, and which trainer ranks can write there: a pure function of where
the processes run.

    on a trainer rank's GPU     a window of that GPU's memory, which both map (cuda_ipc)
    on a trainer rank's host    a window of the host's memory, which both map (shared_memory)
    elsewhere                   memory of the engine rank's own, into which every trainer rank sends (network)

Who does not map a window sends to its home, a trainer rank that does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mcore_rl.errors import ConfigError
from mcore_rl.weights.slices.routes import Places
from mcore_rl.weights.transports.hosts import Host

CUDA_IPC, SHARED_MEMORY, NETWORK = "cuda_ipc", "shared_memory", "network"
VLLM_RDT = "vllm_rdt"
"""vLLM's own way: nothing arrives in windows, whose readers only compare what they have."""
MEMORY = {CUDA_IPC: "a GPU", SHARED_MEMORY: "memory"}
"""What a trainer rank and an engine rank share."""


@dataclass(frozen=True)
class Endpoint:
    """Where a process of a sync runs, and the address at which others reach it; `device` names its GPU, if any."""

    host: Host
    address: str
    device: str = ""


Place = tuple[tuple[str, int], str]
"""A piece of memory: of a host, or of a GPU on it."""


@dataclass(frozen=True)
class Window:
    """Where the buckets of `readers` arrive: engine ranks (counted through all engines) that take the same of each.

    `writers` are the trainer ranks that map it; `home` is the one of them that makes it, and receives for it what
    others send. Without any, it is memory of its only reader.
    """

    readers: tuple[int, ...]
    kind: str = NETWORK
    writers: tuple[int, ...] = ()
    home: int | None = None


@dataclass(frozen=True)
class Topology:
    """All trainer ranks, and the engine ranks that take part, engine by engine."""

    trainers: tuple[Endpoint, ...]
    engines: tuple[Endpoint, ...]
    ranks_per_engine: int
    transport: str = "auto"
    """weights.transport: auto, or the only kind of window that may be."""
    numbers: tuple[int, ...] = ()
    """Of the engines, for messages, where others do not take part."""

    def only(self, numbers: Sequence[int]) -> Topology:
        """Of these engines alone, from one of all."""
        size = self.ranks_per_engine
        ranks = (rank for number in numbers for rank in self.engines[number * size : (number + 1) * size])
        return replace(self, engines=tuple(ranks), numbers=tuple(numbers))

    @cached_property
    def windows(self) -> list[Window]:
        """Of the first engine rank by rank, then of the next that arrives elsewhere.

        Raises: ConfigError where the transport asks for memory that is not shared.
        """
        windows = []
        homes: Counter[Place] = Counter()
        for engines in self._engines_alike():
            for rank in range(self.ranks_per_engine):
                readers = tuple(engine * self.ranks_per_engine + rank for engine in engines)
                kind, writers = self._shared(self.engines[readers[0]])
                home = None
                if writers:
                    place = self._place(self.engines[readers[0]], kind)
                    home = writers[homes[place] % len(writers)]  # the homes of a host's windows take turns
                    homes[place] += 1
                windows.append(Window(readers, kind, writers, home))
        return windows

    @cached_property
    def gpu_windows(self) -> frozenset[int]:
        """Windows to which what is sent goes from GPU to GPU: where every trainer rank, and every engine rank that is
        sent to, has a GPU, and none has another's."""
        sent_to = [number for number, each in enumerate(self.windows) if len(each.writers) < len(self.trainers)]
        receivers = [self.engines[self.windows[n].readers[0]] for n in sent_to if self.windows[n].home is None]
        devices = [endpoint.device for endpoint in (*self.trainers, *receivers)]
        if self.transport == VLLM_RDT or "" in devices or len(set(devices)) < len(devices):
            return frozenset()
        return frozenset(number for number in sent_to if self.windows[number].kind != SHARED_MEMORY)

    @property
    def gpu_members(self) -> tuple[int, ...]:
        """Of the transfer group: who sends to these windows, and who receives for them."""
        windows = [self.windows[number] for number in sorted(self.gpu_windows)]
        receivers = [self.member(window.readers[0]) for window in windows if window.home is None]
        return (*range(len(self.trainers)), *receivers) if windows else ()

    @property
    def places(self) -> Places:
        """Of trainer ranks, and of windows in the place of engine ranks."""
        hosts: dict[tuple[str, int], int] = {}
        devices: dict[str, int] = {"": -1}
        for endpoint in (*self.trainers, *self.engines):
            hosts.setdefault(endpoint.host.memory, len(hosts))
            devices.setdefault(endpoint.device, len(devices))
        of_windows = [self.engines[window.readers[0]] for window in self.windows]
        trainers, windows = (
            [(hosts[endpoint.host.memory], devices[endpoint.device]) for endpoint in endpoints]
            for endpoints in (self.trainers, of_windows)
        )
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
        number = self.numbers[engine] if self.numbers else engine
        return f"rollout engine {number}{of} on {self.engines[member - len(self.trainers)].host.name}"

    def _shared(self, where: Endpoint) -> tuple[str, tuple[int, ...]]:
        """The nearest memory that an engine rank shares with trainer ranks, and these."""
        kinds = [CUDA_IPC, SHARED_MEMORY] if self.transport == "auto" else [self.transport]
        for kind in kinds:
            if kind in (NETWORK, VLLM_RDT) or (kind == CUDA_IPC and not where.device):
                continue
            writers = self._trainers_at.get(self._place(where, kind), ())
            if writers:
                return kind, writers
        if self.transport in MEMORY:
            raise ConfigError(
                f"weights.transport={self.transport}: no trainer rank shares {MEMORY[self.transport]} with the engine "
                f"ranks on {where.host.name}; set it to auto or network"
            )
        return NETWORK, ()

    @cached_property
    def _trainers_at(self) -> dict[Place, tuple[int, ...]]:
        ranks: dict[Place, list[int]] = {}
        for rank, trainer in enumerate(self.trainers):
            for kind in (CUDA_IPC, SHARED_MEMORY) if trainer.device else (SHARED_MEMORY,):
                ranks.setdefault(self._place(trainer, kind), []).append(rank)
        return {place: tuple(at) for place, at in ranks.items()}

    @staticmethod
    def _place(where: Endpoint, kind: str) -> Place:
        return where.host.memory, where.device if kind == CUDA_IPC else ""

    def _engines_alike(self) -> list[list[int]]:
        """Engines whose ranks read the same windows: in the same memory, rank by rank, all shared with trainers."""
        size = self.ranks_per_engine
        alike: dict[object, list[int]] = {}
        for engine in range(len(self.engines) // size):
            ranks = self.engines[engine * size : (engine + 1) * size]
            kinds = [self._shared(where)[0] for where in ranks]
            places = tuple(self._place(where, kind) for where, kind in zip(ranks, kinds, strict=True))
            alike.setdefault(engine if NETWORK in kinds else (tuple(kinds), places), []).append(engine)
        return list(alike.values())
