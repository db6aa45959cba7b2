"""Routes of a weight sync: the trainer rank that sends each slice to each engine rank.

A holder on the engine rank's device is preferred, then one on its host, then the holder that has sent the fewest bytes
to other hosts so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mcore_rl.weights.slices.shard_map import (
    Consumers,
    IntArray,
    Portion,
    RowPiece,
    ShardMap,
    cut,
    index_bytes,
    runs_of,
)
from model_converters.mapping.placement import Holding, Placement, segments_of
from model_converters.mapping.table import Row


@dataclass(frozen=True, eq=False)
class RankLocations:
    """Host and device numbers of all ranks. Device numbers are unique across hosts; -1 is a rank without a GPU.

    Shapes: int64 [trainer ranks] and [engine ranks].
    """

    trainer_hosts: IntArray
    trainer_devices: IntArray
    engine_hosts: IntArray
    engine_devices: IntArray

    @classmethod
    def of(cls, trainers: Sequence[tuple[int, int]], engines: Sequence[tuple[int, int]]) -> RankLocations:
        """Create from the (host, device) pairs of all trainer ranks and of all engine ranks, engine by engine."""
        hosts_and_devices = [np.array(ranks, np.int64).reshape(-1, 2).T for ranks in (trainers, engines)]
        (hosts, devices), (engine_hosts, engine_devices) = hosts_and_devices
        return cls(hosts, devices, engine_hosts, engine_devices)


class RunOverlap(NamedTuple):
    """Intersection of an engine shard and a trainer shard: indices `start : start + length` of HF tensor number `part`.

    The trainer's tensor has them from index `local_start` on. Units: indices of the row's dim.
    """

    part: int
    start: int
    length: int
    local_start: int


@dataclass(frozen=True, eq=False)
class Route:
    """Transfers of one row piece from the holders of one trainer shard.

    receivers[i] keeps engine shard shards[i] and receives num_bytes[i] from senders[i]. Receivers are engine ranks,
    counted through all engines.
    """

    piece: RowPiece
    holding: Holding
    num_shards: int
    receivers: IntArray
    shards: IntArray
    senders: IntArray
    num_bytes: IntArray

    def overlaps(self, shard: int) -> tuple[RunOverlap, ...]:
        """Return the indices that a receiver with this engine shard gets."""
        trainer_shard = Portion(self.holding.shard, self.holding.num_shards)
        return overlaps_of(self.piece.bound.row, self.piece.portion, trainer_shard, Portion(shard, self.num_shards))


class SliceRouter:
    """Assigns a sender to every slice. Deterministic: all processes that route the same pieces in the same order agree.

    `locations` contains the ranks of a whole number of engines.
    """

    def __init__(self, placement: Placement, shard_map: ShardMap, locations: RankLocations) -> None:
        self._placement = placement
        self._shard_map = shard_map
        self._locations = locations
        self._num_engines = len(locations.engine_hosts) // shard_map.layout.num_ranks
        # By range of holders: the holder for each engine rank (a cache), and the bytes that each holder has sent to
        # other hosts so far.
        self._near: dict[range, IntArray] = {}
        self._sent: dict[range, IntArray] = {}
        self._receivers: dict[tuple[Consumers, bytes], tuple[IntArray, IntArray]] = {}

    def routes(self, piece: RowPiece) -> Iterator[Route]:
        """Yield one route per trainer shard that intersects the piece."""
        consumers = self._shard_map.consumers(piece.bound)
        for holding in self._placement.holdings(piece.bound):
            trainer_shard = Portion(holding.shard, holding.num_shards)
            sizes = _overlap_bytes(
                piece.bound.row, piece.portion, trainer_shard, consumers.num_shards, piece.bound.dtype.itemsize
            )
            receivers, shards = self._receiving(consumers, sizes)
            if len(receivers):
                num_bytes = sizes[shards]
                senders = self._senders(holding.ranks, receivers, num_bytes)
                yield Route(piece, holding, consumers.num_shards, receivers, shards, senders, num_bytes)

    def _receiving(self, consumers: Consumers, sizes: IntArray) -> tuple[IntArray, IntArray]:
        """Return the engine ranks with a nonzero size, engine by engine, and their shards."""
        nonzero = sizes > 0
        # Consumers compare by identity: ShardMap returns one object per distribution.
        key = (consumers, nonzero.tobytes())
        if key not in self._receivers:
            receiving = nonzero[consumers.shards]
            firsts = np.arange(self._num_engines) * self._shard_map.layout.num_ranks
            ranks = (firsts[:, None] + consumers.ranks[receiving]).ravel()
            self._receivers[key] = ranks, np.tile(consumers.shards[receiving], self._num_engines)
        return self._receivers[key]

    def _senders(self, holders: range, receivers: IntArray, num_bytes: IntArray) -> IntArray:
        if len(holders) == 1:
            return np.full(len(receivers), holders[0])
        if holders not in self._near:
            self._near[holders] = self._nearest(holders)
            self._sent[holders] = np.zeros(len(holders), np.int64)
        # Indexing with an array copies, so the assignment below does not change the cached holders.
        senders = self._near[holders][receivers]
        far = np.flatnonzero(senders < 0)
        if len(far):
            # No holder on these receivers' hosts.
            sent = self._sent[holders]
            # Assign receivers round-robin, beginning with the holder that has sent the fewest bytes.
            order = np.argsort(sent, kind="stable")[np.arange(len(far)) % len(holders)]
            senders[far] = holders.start + holders.step * order
            sent += np.bincount(order, weights=num_bytes[far], minlength=len(holders)).astype(np.int64)
        return senders

    def _nearest(self, holders: range) -> IntArray:
        """Return a holder for every engine rank: on its device, else on its host (round-robin), else -1."""
        locations = self._locations
        on_device = {
            int(locations.trainer_devices[rank]): rank for rank in holders if locations.trainer_devices[rank] >= 0
        }
        on_host: dict[int, list[int]] = {}
        for rank in holders:
            on_host.setdefault(int(locations.trainer_hosts[rank]), []).append(rank)
        last_used: dict[int, int] = {}
        nearest = []
        for host, device in zip(locations.engine_hosts.tolist(), locations.engine_devices.tolist(), strict=True):
            sender = on_device.get(device, -1)
            if sender < 0 and host in on_host:
                index = last_used[host] = last_used.get(host, -1) + 1
                sender = on_host[host][index % len(on_host[host])]
            nearest.append(sender)
        return np.array(nearest)


@lru_cache(maxsize=1 << 16)
def overlaps_of(row: Row, portion: Portion, trainer_shard: Portion, engine_shard: Portion) -> tuple[RunOverlap, ...]:
    """Intersect a portion of an engine shard with a trainer shard."""
    overlaps = []
    for run in runs_of(row, engine_shard):
        part, start, length = cut(run, portion)
        for segment in segments_of(row, *trainer_shard):
            low, high = max(start, segment.start), min(start + length, segment.start + segment.length)
            if segment.part == part and low < high:
                overlaps.append(RunOverlap(part, low, high - low, segment.local_start + low - segment.start))
    return tuple(overlaps)


@lru_cache(maxsize=1 << 16)
def _overlap_bytes(row: Row, portion: Portion, trainer_shard: Portion, num_shards: int, element_bytes: int) -> IntArray:
    """Return the bytes of the overlaps with every engine shard. Shapes: int64 [num_shards]."""
    sizes = np.zeros(num_shards, np.int64)
    for engine_shard in range(num_shards):
        for overlap in overlaps_of(row, portion, trainer_shard, Portion(engine_shard, num_shards)):
            sizes[engine_shard] += overlap.length * index_bytes(row, overlap.part, element_bytes)
    return sizes
