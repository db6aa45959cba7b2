"""Topology of a weight sync: the staging buffer of each engine rank and the trainer ranks that can write it.

A pure function of the hosts and GPUs of all processes. An engine rank's buffer is

    on a trainer rank's GPU     GPU memory that both map (cuda_ipc)
    on a GPU of its own         private memory of the engine rank, to which every trainer rank sends (network)
    on a trainer rank's host    host memory that both map (shared_memory)
    elsewhere                   private memory of the engine rank, as above

With weights.transport=files every trainer rank writes files. Rank r of every engine reads the same ones into private
memory, so these ranks count as the readers of one buffer (files).

Between GPUs of one host NCCL uses NVLink if it is there. It connects the processes only if each has its own GPU.

Trainer ranks that do not map a shared buffer send to its owner, which is one of the trainer ranks that map it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mcore_rl.errors import ConfigError
from mcore_rl.weights.slices.senders import ELSEWHERE, RankLocations
from mcore_rl.weights.transports.hosts import Host

CUDA_IPC, SHARED_MEMORY, NETWORK, FILES = "cuda_ipc", "shared_memory", "network", "files"
SHARED_RESOURCE = {CUDA_IPC: "a GPU", SHARED_MEMORY: "memory"}
"""Resource that a trainer rank and an engine rank share, by transport; for messages."""


@dataclass(frozen=True)
class Endpoint:
    """Host and network address of a process of a sync. `device`: UUID of its GPU, "" without one. `nccl`: version of
    its NCCL library."""

    host: Host
    address: str
    device: str = ""
    nccl: str = ""


MemoryDomain = tuple[tuple[str, int], str]
"""Memory of a host (device ""), or of one of its GPUs."""


@dataclass(frozen=True)
class StagingBuffer:
    """Memory through which `readers` receive their buckets.

    readers: engine ranks, counted through all engines, that need the same part of each bucket.
    writers: trainer ranks that map the memory.
    owner: the writer that creates the memory and relays messages from trainer ranks that do not map it.

    Without writers it is private memory of its only reader, or of each reader if `kind` is files.
    """

    readers: tuple[int, ...]
    kind: str = NETWORK
    writers: tuple[int, ...] = ()
    owner: int | None = None


@dataclass(frozen=True)
class Topology:
    """Endpoints of all trainer ranks, and of the engine ranks that take part, engine by engine."""

    trainers: tuple[Endpoint, ...]
    engines: tuple[Endpoint, ...]
    ranks_per_engine: int
    transport: str = "auto"
    """Value of weights.transport: auto, or the kind that every staging buffer must have."""
    delta: bool = False
    """Value of weights.delta: messages between hosts contain only the changed words (delta/)."""
    engine_numbers: tuple[int, ...] = ()
    """Numbers of the engines for messages, if only some of the run's engines take part."""

    def for_engines(self, numbers: Sequence[int]) -> Topology:
        """Return the topology with these engines only."""
        size = self.ranks_per_engine
        ranks = (rank for number in numbers for rank in self.engines[number * size : (number + 1) * size])
        return replace(self, engines=tuple(ranks), engine_numbers=tuple(numbers))

    @cached_property
    def buffers(self) -> list[StagingBuffer]:
        """Staging buffers of the first group of engines that share buffers, rank by rank, then of the next group.

        Raises: ConfigError if the transport requires shared memory and a rank shares none.
        """
        buffers = []
        owners: Counter[MemoryDomain] = Counter()
        for engines in self._engines_sharing_buffers():
            for rank in range(self.ranks_per_engine):
                readers = tuple(engine * self.ranks_per_engine + rank for engine in engines)
                kind, writers = self._nearest_memory(self.engines[readers[0]])
                owner = None
                if writers:
                    domain = self._domain(self.engines[readers[0]], kind)
                    owner = writers[owners[domain] % len(writers)]  # round-robin, to spread the relaying
                    owners[domain] += 1
                buffers.append(StagingBuffer(readers, kind, writers, owner))
        return buffers

    @cached_property
    def gpu_buffers(self) -> frozenset[int]:
        """Buffers whose messages are sent with NCCL.

        NCCL is used only if every trainer rank and every receiving engine rank has a GPU of its own: it does not
        support two ranks on one GPU.
        """
        # Buffers that some trainer rank does not map: only these receive messages.
        sent_to = [number for number, each in enumerate(self.buffers) if len(each.writers) < len(self.trainers)]
        receivers = [self.engines[self.buffers[n].readers[0]] for n in sent_to if self.buffers[n].owner is None]
        if self.transport == FILES or not _have_own_gpus([*self.trainers, *receivers]):
            return frozenset()
        others = (
            number for number in sent_to if not all(self.sends_delta(number, rank) for rank in self._remote(number))
        )
        return frozenset(number for number in others if self.buffers[number].kind != SHARED_MEMORY)

    @property
    def gpu_members(self) -> tuple[int, ...]:
        """Members of the transfer group that send or receive messages of `gpu_buffers`."""
        buffers = [self.buffers[number] for number in sorted(self.gpu_buffers)]
        receivers = [self.member(buffer.readers[0]) for buffer in buffers if buffer.owner is None]
        return (*range(len(self.trainers)), *receivers) if buffers else ()

    def check_versions(self) -> None:
        """Check that all processes that send or receive between GPUs have the same NCCL.

        Raises: ConfigError. NCCL itself would end the connection with an invalid usage.
        """
        processes, versions = (*self.trainers, *self.engines), dict[str, str]()
        for member in self.gpu_members:
            versions.setdefault(processes[member].nccl, self.name(member))
        if len(versions) > 1:
            found = ", ".join(f"{version} ({name})" for version, name in versions.items())
            raise ConfigError(
                f"weights.transport={self.transport}: trainer ranks and engine ranks have different versions of NCCL, "
                f"which do not connect: {found}; install one version of nvidia-nccl-cu13 in both environments (pip "
                "install --no-deps), or set weights.transport=shared_memory if all ranks are on one host"
            )

    @property
    def locations(self) -> RankLocations:
        """Locations of trainer ranks and, in place of engine ranks, of staging buffers."""
        hosts: dict[tuple[str, int], int] = {}
        devices: dict[str, int] = {"": -1}
        # Numbers in the order of first occurrence, so that all processes compute the same.
        places = {
            endpoint: (
                hosts.setdefault(endpoint.host.memory, len(hosts)),
                devices.setdefault(endpoint.device, len(devices)),
            )
            for endpoint in (*self.trainers, *self.engines)
        }
        # Files are equally far from all trainer ranks, so these divide the sending.
        of_buffers = [
            ELSEWHERE if buffer.kind == FILES else places[self.engines[buffer.readers[0]]] for buffer in self.buffers
        ]
        return RankLocations.of([places[endpoint] for endpoint in self.trainers], of_buffers)

    def sends_delta(self, number: int, trainer_rank: int) -> bool:
        """Return whether a trainer rank's messages to buffer `number` are frames of delta/, which travel through host
        memory: they go to another host, or are files."""
        if not self.delta or trainer_rank in self.buffers[number].writers:
            return False
        if self.transport == FILES:
            return True
        here = self.engines[self.buffers[number].readers[0]].host
        return self.trainers[trainer_rank].host.memory != here.memory

    def buffer_of(self, engine_rank: int) -> int:
        return next(number for number, buffer in enumerate(self.buffers) if engine_rank in buffer.readers)

    def member(self, engine_rank: int) -> int:
        """Return the number of an engine rank in the transfer group, where the trainer ranks come first."""
        return len(self.trainers) + engine_rank

    def recipients(self, number: int) -> list[int]:
        """Return the members to which a message for all readers of a buffer is sent. One file serves all of them."""
        readers = self.buffers[number].readers
        return [self.member(reader) for reader in (readers[:1] if self.transport == FILES else readers)]

    def target(self, number: int) -> int:
        """Return the member that receives messages of trainer ranks that do not map buffer `number`."""
        buffer = self.buffers[number]
        return self.member(buffer.readers[0]) if buffer.owner is None else buffer.owner

    def name(self, member: int) -> str:
        """Return the name of a member of the transfer group, for messages."""
        if member < len(self.trainers):
            return f"trainer rank {member} on {self.trainers[member].host.name}"
        engine, rank = divmod(member - len(self.trainers), self.ranks_per_engine)
        suffix = f", rank {rank}" if self.ranks_per_engine > 1 else ""
        number = self.engine_numbers[engine] if self.engine_numbers else engine
        return f"rollout engine {number}{suffix} on {self.engines[member - len(self.trainers)].host.name}"

    def _nearest_memory(self, where: Endpoint) -> tuple[str, tuple[int, ...]]:
        """Return the kind of the closest memory that an endpoint shares with trainer ranks, and these ranks.

        Raises: ConfigError if weights.transport requires shared memory and there is none.
        """
        if self.transport == FILES:
            return FILES, ()
        for kind in self._kinds(where):
            if kind == NETWORK or (kind == CUDA_IPC and not where.device):
                continue
            writers = self._trainers_at.get(self._domain(where, kind), ())
            if writers:
                return kind, writers
        if self.transport in SHARED_RESOURCE:
            raise ConfigError(
                f"weights.transport={self.transport}: no trainer rank shares {SHARED_RESOURCE[self.transport]} with "
                f"the engine ranks on {where.host.name}; set it to auto or network"
            )
        return NETWORK, ()

    def _kinds(self, where: Endpoint) -> list[str]:
        """Return the kinds of memory to look for, nearest first."""
        if self.transport != "auto":
            return [self.transport]
        # From one GPU to another, NCCL is faster than two copies through the host's memory.
        return [CUDA_IPC] if where.device and self._one_gpu_each else [CUDA_IPC, SHARED_MEMORY]

    def _remote(self, number: int) -> list[int]:
        """Return the trainer ranks that do not map buffer `number`."""
        return [rank for rank in range(len(self.trainers)) if rank not in self.buffers[number].writers]

    @cached_property
    def _one_gpu_each(self) -> bool:
        """True if NCCL can connect the trainer ranks with the engine ranks that share neither GPU nor host memory with
        them: each has its own GPU."""
        receivers = [
            engine for engine in self.engines
            if self._domain(engine, CUDA_IPC if engine.device else SHARED_MEMORY) not in self._trainers_at
        ]  # fmt: skip
        return _have_own_gpus([*self.trainers, *receivers])

    @cached_property
    def _trainers_at(self) -> dict[MemoryDomain, tuple[int, ...]]:
        ranks: dict[MemoryDomain, list[int]] = {}
        for rank, trainer in enumerate(self.trainers):
            for kind in (CUDA_IPC, SHARED_MEMORY) if trainer.device else (SHARED_MEMORY,):
                ranks.setdefault(self._domain(trainer, kind), []).append(rank)
        return {domain: tuple(at) for domain, at in ranks.items()}

    @staticmethod
    def _domain(where: Endpoint, kind: str) -> MemoryDomain:
        if kind == FILES:  # all hosts share the files
            return ("", 0), ""
        return where.host.memory, where.device if kind == CUDA_IPC else ""

    def _engines_sharing_buffers(self) -> list[list[int]]:
        """Group engines that read the same buffers: all their ranks share the same memory with trainer ranks."""
        size = self.ranks_per_engine
        groups: dict[object, list[int]] = {}
        for engine in range(len(self.engines) // size):
            ranks = self.engines[engine * size : (engine + 1) * size]
            kinds = [self._nearest_memory(where)[0] for where in ranks]
            domains = tuple(self._domain(where, kind) for where, kind in zip(ranks, kinds, strict=True))
            # An engine with a rank that shares no memory has buffers of its own.
            groups.setdefault(engine if NETWORK in kinds else (tuple(kinds), domains), []).append(engine)
        return list(groups.values())


def _have_own_gpus(endpoints: Sequence[Endpoint]) -> bool:
    devices = [endpoint.device for endpoint in endpoints]
    return "" not in devices and len(set(devices)) == len(devices)
