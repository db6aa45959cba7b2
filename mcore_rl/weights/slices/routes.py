"""Routes of a weight sync: the trainer rank that sends each slice to each engine rank (senders.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from mcore_rl.weights.quantization import Encoding
from mcore_rl.weights.slices.senders import RankLocations, choose_senders
from mcore_rl.weights.slices.shard_map import (
    WHOLE,
    Consumers,
    IndexRun,
    IntArray,
    Portion,
    RowPiece,
    ShardMap,
    cut,
    run_box,
    runs_of,
)
from model_converters.mapping.placement import Holding, Placement, ShardPart, held_segments
from model_converters.mapping.table import Row


class RunOverlap(NamedTuple):
    """Intersection of an engine shard and a trainer shard: indices `start : start + length` of HF tensor number `part`.

    The trainer's tensor has them from index `local_start` on. Units: indices of the row's dim.
    rows: rows [first, end) of the HF tensor, if the row's dim is another one and the trainer rank holds these only.
    """

    part: int
    start: int
    length: int
    local_start: int
    rows: tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class Route:
    """Transfers of one row piece from the holders of one trainer shard.

    receivers[i] keeps engine shard shards[i] and receives num_bytes[i] from senders[i]. Receivers are engine ranks,
    counted through all engines.
    """

    piece: RowPiece
    holding: Holding
    encoding: Encoding
    num_shards: int
    receivers: IntArray
    shards: IntArray
    senders: IntArray
    num_bytes: IntArray

    def overlaps(self, shard: int) -> tuple[RunOverlap, ...]:
        """Return the indices that a receiver with this engine shard gets."""
        engine_shard = Portion(shard, self.num_shards)
        return overlaps_of(
            self.piece.bound.row, self.piece.portion, self.holding.held, engine_shard, self.encoding.step
        )


@dataclass(frozen=True, eq=False)
class RouteMap:
    """Holders, consumers and locations of all tensors of a sync. `locations` contains the ranks of a whole number of
    engines."""

    placement: Placement
    shard_map: ShardMap
    locations: RankLocations

    @cached_property
    def choices(self) -> dict[range, IntArray]:
        """Possible senders by range of holders, which are few for every engine rank."""
        return choose_senders(self._bytes_of_holders(), self.locations, self.shard_map.layout.num_ranks)

    def _bytes_of_holders(self) -> dict[range, IntArray]:
        """Return the bytes that every engine rank receives from each range of holders."""
        num_ranks = self.shard_map.layout.num_ranks
        # Layers and experts share sizes: count them before adding.
        numbers: Counter[tuple[range, int, Consumers]] = Counter()
        sizes: dict[int, IntArray] = {}
        for bound in self.shard_map.rows:
            consumers, encoding = self.shard_map.consumers(bound), self.shard_map.encoding(bound)
            for holding in self.placement.holdings(bound):
                of_shards = _overlap_bytes(bound.row, WHOLE, holding.held, consumers.num_shards, encoding)
                sizes[id(of_shards)] = of_shards
                numbers[holding.ranks, id(of_shards), consumers] += 1
        found: dict[range, IntArray] = {}
        for (holders, of_shards_id, consumers), number in numbers.items():
            of_engine = found.setdefault(holders, np.zeros(num_ranks, np.int64))
            of_engine[consumers.ranks] += number * sizes[of_shards_id][consumers.shards]
        num_engines = len(self.locations.engine_hosts) // num_ranks
        return {holders: np.tile(of_engine, num_engines) for holders, of_engine in found.items()}


class SliceRouter:
    """Assigns a sender to every slice. Deterministic: all processes that route the same pieces in the same order agree.
    A router routes the pieces of one sync once."""

    def __init__(self, route_map: RouteMap) -> None:
        locations = route_map.locations
        self._map = route_map
        self._placement = route_map.placement
        self._shard_map = route_map.shard_map
        self._num_engines = len(locations.engine_hosts) // self._shard_map.layout.num_ranks
        self._sent = np.zeros(len(locations.trainer_hosts), np.int64)
        """Bytes that each trainer rank has sent so far where there was a choice, counted separately for frozen pieces
        and for all others: most updates contain only the latter."""
        self._is_frozen = False
        self._receivers: dict[tuple[Consumers, bytes], tuple[IntArray, IntArray]] = {}

    def routes(self, piece: RowPiece) -> Iterator[Route]:
        """Yield one route per trainer shard that intersects the piece."""
        if self._is_frozen and not self._shard_map.is_frozen(piece.bound):
            self._sent[:] = 0
        self._is_frozen = self._shard_map.is_frozen(piece.bound)
        consumers, encoding = self._shard_map.consumers(piece.bound), self._shard_map.encoding(piece.bound)
        for holding in self._placement.holdings(piece.bound):
            sizes = _overlap_bytes(piece.bound.row, piece.portion, holding.held, consumers.num_shards, encoding)
            receivers, shards = self._receiving(consumers, sizes)
            if len(receivers):
                num_bytes = sizes[shards]
                senders = self._senders(holding.ranks, receivers, num_bytes)
                yield Route(piece, holding, encoding, consumers.num_shards, receivers, shards, senders, num_bytes)

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
        candidates = self._map.choices[holders][receivers]
        if candidates.shape[1] == 1:
            return candidates[:, 0]
        # Of several senders, the one that has sent the fewest bytes. Receivers of this piece that share a sender do not
        # see each other's bytes; the next piece evens that out.
        rows = np.arange(len(receivers))
        senders = candidates[rows, self._sent[candidates].argmin(axis=1)]
        self._sent += np.bincount(senders, weights=num_bytes, minlength=len(self._sent)).astype(np.int64)
        return senders


@lru_cache(maxsize=1 << 16)
def overlaps_of(
    row: Row, portion: Portion, held: ShardPart, engine_shard: Portion, step: int
) -> tuple[RunOverlap, ...]:
    """Intersect a portion of an engine shard, cut at multiples of `step`, with a part of a trainer shard."""
    overlaps = []
    for run in runs_of(row, engine_shard):
        part, start, length = cut(run, portion, step)
        for segment in held_segments(row, held):
            low, high = max(start, segment.start), min(start + length, segment.start + segment.length)
            if segment.part == part and low < high:
                local_start = segment.local_start + low - segment.start
                overlaps.append(RunOverlap(part, low, high - low, local_start, segment.rows))
    return tuple(overlaps)


@lru_cache(maxsize=1 << 16)
def _overlap_bytes(row: Row, portion: Portion, held: ShardPart, num_shards: int, encoding: Encoding) -> IntArray:
    """Return the bytes of the overlaps with every engine shard. Shapes: int64 [num_shards]."""
    sizes = np.zeros(num_shards, np.int64)
    for engine_shard in range(num_shards):
        for overlap in overlaps_of(row, portion, held, Portion(engine_shard, num_shards), encoding.step):
            run = IndexRun(overlap.part, overlap.start, overlap.length)
            sizes[engine_shard] += encoding.num_bytes(*run_box(row, run, overlap.rows))
    return sizes
