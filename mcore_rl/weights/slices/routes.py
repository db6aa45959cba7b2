"""Which trainer rank sends what an engine rank needs: one on the same device, else on the same host, else the holder
that has sent the fewest bytes to other hosts so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mcore_rl.weights.slices.needs import Chunk, Needs, Nth, Ranks, Takers, cut, index_bytes, needs_of
from model_converters.mapping.placement import Holding, Placement, segments_of
from model_converters.mapping.table import Row


@dataclass(frozen=True, eq=False)
class Places:
    """Where ranks run: numbers of hosts, and of devices (no two hosts share one; -1: none, on a CPU)."""

    trainer_hosts: Ranks
    trainer_devices: Ranks
    engine_hosts: Ranks
    engine_devices: Ranks

    @classmethod
    def of(cls, trainers: Sequence[tuple[int, int]], engines: Sequence[tuple[int, int]]) -> Places:
        """(host, device) of every trainer rank, and of every engine rank, engine by engine."""
        hosts_and_devices = [np.array(ranks, np.int64).reshape(-1, 2).T for ranks in (trainers, engines)]
        (hosts, devices), (engine_hosts, engine_devices) = hosts_and_devices
        return cls(hosts, devices, engine_hosts, engine_devices)


class Share(NamedTuple):
    """`length` indices of HF part `part` from `start`, which the trainer's shard has from `local_start`. Units: indices
    of the row's dim."""

    part: int
    start: int
    length: int
    local_start: int


@dataclass(frozen=True, eq=False)
class Route:
    """What the holders of one shard of the trainer send of a chunk: receiver i, which takes the engine's shard
    shards[i], gets num_bytes[i] from senders[i]. Receivers are engine ranks, counted through all engines."""

    chunk: Chunk
    holding: Holding
    num_shards: int
    receivers: Ranks
    shards: Ranks
    senders: Ranks
    num_bytes: Ranks

    def shares(self, shard: int) -> tuple[Share, ...]:
        """What a receiver of this shard gets."""
        held = Nth(self.holding.shard, self.holding.num_shards)
        return shares_of(self.chunk.bound.row, self.chunk.piece, held, Nth(shard, self.num_shards))


class Router:
    """Routes chunks in the order in which it is asked; every process that asks in the same order gets the same.

    `places` has as many engine ranks as a whole number of engines.
    """

    def __init__(self, placement: Placement, needs: Needs, places: Places) -> None:
        self._placement = placement
        self._needs = needs
        self._places = places
        self._num_engines = len(places.engine_hosts) // needs.layout.num_ranks
        self._near: dict[range, Ranks] = {}
        self._sent: dict[range, Ranks] = {}
        self._receivers: dict[tuple[Takers, bytes], tuple[Ranks, Ranks]] = {}

    def routes(self, chunk: Chunk) -> Iterator[Route]:
        """One per shard of the trainer that has anything of the chunk."""
        takers = self._needs.takers(chunk.bound)
        for holding in self._placement.holdings(chunk.bound):
            held = Nth(holding.shard, holding.num_shards)
            sizes = _share_bytes(chunk.bound.row, chunk.piece, held, takers.num_shards, chunk.bound.dtype.itemsize)
            receivers, shards = self._taking(takers, sizes)
            if len(receivers):
                num_bytes = sizes[shards]
                senders = self._senders(holding.ranks, receivers, num_bytes)
                yield Route(chunk, holding, takers.num_shards, receivers, shards, senders, num_bytes)

    def _taking(self, takers: Takers, sizes: Ranks) -> tuple[Ranks, Ranks]:
        """(engine rank, shard) of all that get any byte, engine by engine."""
        something = sizes > 0
        key = (takers, something.tobytes())
        if key not in self._receivers:
            taking = something[takers.shards]
            firsts = np.arange(self._num_engines) * self._needs.layout.num_ranks
            ranks = (firsts[:, None] + takers.ranks[taking]).ravel()
            self._receivers[key] = ranks, np.tile(takers.shards[taking], self._num_engines)
        return self._receivers[key]

    def _senders(self, holders: range, receivers: Ranks, num_bytes: Ranks) -> Ranks:
        if len(holders) == 1:
            return np.full(len(receivers), holders[0])
        if holders not in self._near:
            self._near[holders] = self._nearest(holders)
            self._sent[holders] = np.zeros(len(holders), np.int64)
        senders = self._near[holders][receivers]
        far = np.flatnonzero(senders < 0)
        if len(far):
            sent = self._sent[holders]
            # Receivers are dealt in rounds, each beginning with the holder that has sent least.
            order = np.argsort(sent, kind="stable")[np.arange(len(far)) % len(holders)]
            senders[far] = holders.start + holders.step * order
            sent += np.bincount(order, weights=num_bytes[far], minlength=len(holders)).astype(np.int64)
        return senders

    def _nearest(self, holders: range) -> Ranks:
        """For every engine rank a holder on its device, else one on its host (they take turns), else -1."""
        places = self._places
        on_device = {int(places.trainer_devices[rank]): rank for rank in holders if places.trainer_devices[rank] >= 0}
        on_host: dict[int, list[int]] = {}
        for rank in holders:
            on_host.setdefault(int(places.trainer_hosts[rank]), []).append(rank)
        turns: dict[int, int] = {}
        nearest = []
        for host, device in zip(places.engine_hosts.tolist(), places.engine_devices.tolist(), strict=True):
            sender = on_device.get(device, -1)
            if sender < 0 and host in on_host:
                turn = turns[host] = turns.get(host, -1) + 1
                sender = on_host[host][turn % len(on_host[host])]
            nearest.append(sender)
        return np.array(nearest)


@lru_cache(maxsize=1 << 16)
def shares_of(row: Row, piece: Nth, held: Nth, taker: Nth) -> tuple[Share, ...]:
    """What shard `held` of the trainer has of a piece of what shard `taker` of the engine takes."""
    shares = []
    for need in needs_of(row, taker):
        part, start, length = cut(need, piece)
        for segment in segments_of(row, *held):
            low, high = max(start, segment.start), min(start + length, segment.start + segment.length)
            if segment.part == part and low < high:
                shares.append(Share(part, low, high - low, segment.local_start + low - segment.start))
    return tuple(shares)


@lru_cache(maxsize=1 << 16)
def _share_bytes(row: Row, piece: Nth, held: Nth, num_takers: int, element_bytes: int) -> Ranks:
    """Bytes of what shares_of says, by shard of the engine."""
    sizes = np.zeros(num_takers, np.int64)
    for taker in range(num_takers):
        for share in shares_of(row, piece, held, Nth(taker, num_takers)):
            sizes[taker] += share.length * index_bytes(row, share.part, element_bytes)
    return sizes
