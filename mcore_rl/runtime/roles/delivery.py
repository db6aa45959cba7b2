"""How trajectories come from the process that made them to those that read them.

They stay in the process that made them, until the driver lets go of them. Each reader fetches its own rows and nothing
else: its maker cuts them out, the reader puts them together, and the tensor and pipeline peers of a rank read the same
object. So a trajectory crosses to another host once, and the driver's calls do not grow with the number of makers
times that of readers.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import ray
from ray.exceptions import GetTimeoutError

from mcore_rl.data.trajectories import join_rows, ragged, take_rows
from mcore_rl.errors import McoreRLError, PeerLostError, WorkerDiedError
from mcore_rl.runtime.health import Watch
from mcore_rl.types import Batch, BuffersRef, RolloutTask, TrajectoryBuffers


@dataclass(frozen=True)
class Place:
    """The process `handle`, whose name is `maker`, keeps trajectories under `key` as long as this object is there."""

    maker: str
    handle: Any
    key: int


@dataclass(frozen=True)
class Part:
    """Where the trajectories of a chunk are from row `first` on and before row `last`: those of the task's `responses`,
    from one number on and before another; a response may have several. `digests` as RolloutScalars has them."""

    place: Place
    first: int
    last: int
    responses: tuple[int, int]
    digests: np.ndarray | None = None


@dataclass
class Chunk:
    """A BuffersRef of the trajectories of one task, in the order of `parts`. `renew` makes those of its chunks anew,
    elsewhere, whose makers are lost with them; it returns whether any was."""

    parts: list[Part]
    task: RolloutTask
    renew: Callable[[Sequence[Chunk]], bool]


@dataclass(frozen=True)
class DriverChunk:
    """A BuffersRef of trajectories that the driver has made itself, of texts."""

    buffers: TrajectoryBuffers


class Kept:
    """A maker's side."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._keys = itertools.count()
        self._chunks: dict[int, TrajectoryBuffers] = {}
        self._request_ids: dict[int, Sequence[str]] = {}

    def keep(self, buffers: TrajectoryBuffers, request_ids: Sequence[str] = ()) -> int:
        """`request_ids`: of the attempts that they came from."""
        key = next(self._keys)
        self._chunks[key], self._request_ids[key] = buffers, request_ids
        return key

    def all_of(self, key: int) -> TrajectoryBuffers:
        return self._chunks[key]

    def forget(self, keys: Sequence[int]) -> list[str]:
        """What was kept; returns the requests that it came from."""
        for key in keys:
            del self._chunks[key]
        return [request_id for key in keys for request_id in self._request_ids.pop(key)]

    def cut(self, keys: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> TrajectoryBuffers:
        """`rows[offsets[i]:offsets[i + 1]]` of what is kept under `keys[i]`, one after the other.

        Raises: McoreRLError for what is not here (any more).
        """
        parts = []
        for key, of_key in zip(keys.tolist(), np.split(rows, offsets[1:-1]), strict=True):
            if key not in self._chunks:
                raise McoreRLError(f"{self._name} has no trajectories under {key}")
            parts.append(take_rows(self._chunks[key], of_key))
        return join_rows(parts)


@dataclass
class Forgotten:
    """The driver's side: what makers keep and nobody refers to any more, by maker."""

    _keys: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def refer(self, maker: str, handle: Any, key: int) -> Place:
        place = Place(maker, handle, key)
        weakref.finalize(place, self._keys[maker].append, key).atexit = False
        return place

    def take(self, maker: str) -> list[int]:
        """Since the last call."""
        keys = self._keys[maker]
        taken = keys[:]
        del keys[: len(taken)]
        return taken


@dataclass(frozen=True)
class Rows:
    """Some rows of some chunks: `rows[offsets[i]:offsets[i + 1]]` of the chunk number `chunks[i]`."""

    chunks: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray

    @staticmethod
    def of(by_chunk: Sequence[np.ndarray]) -> Rows:
        """`by_chunk[i]` are those of chunk i."""
        numbers = np.array([number for number, rows in enumerate(by_chunk) if len(rows)], np.int64)
        wanted = [by_chunk[number] for number in numbers]
        return Rows(numbers, np.cumsum([0, *map(len, wanted)]), np.concatenate([*wanted, np.empty(0, np.int64)]))


@dataclass(frozen=True)
class Wanted:
    """What a reader fetches: `rows[offsets[i]:offsets[i + 1]]` of what `makers[maker_of[i]]` keeps under `keys[i]`.
    `handles`: of makers that it has not heard of."""

    makers: list[str]
    maker_of: np.ndarray
    keys: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    handles: dict[str, Any]
    timeout_seconds: float


def fetch(wanted: Wanted, handles: dict[str, Any]) -> TrajectoryBuffers:
    """A reader's side: all of it, chunk after chunk, by one call to each maker. `handles` of makers are kept from call
    to call.

    Raises: PeerLostError naming a maker that does not answer.
    """
    handles |= wanted.handles
    calls, places = [], []
    for number, maker in enumerate(wanted.makers):
        pieces = np.flatnonzero(wanted.maker_of == number)
        of_maker, offsets = ragged(wanted.offsets, pieces)
        calls.append(handles[maker].cut.remote(wanted.keys[pieces], offsets, wanted.rows[of_maker]))
        places.append(of_maker)
    try:
        joined = join_rows(ray.get(calls, timeout=wanted.timeout_seconds))
    except GetTimeoutError:
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        silent = sorted(maker for maker, call in zip(wanted.makers, calls, strict=True) if call not in ready)
        raise PeerLostError(f"no trajectories came from {', '.join(silent)} in {wanted.timeout_seconds:g} s") from None
    order = np.argsort(np.concatenate(places))
    return joined if np.array_equal(order, np.arange(len(order))) else take_rows(joined, order)


class Located:
    """Where the rows of chunks are: of all parts, chunk after chunk, as arrays, since every reader has some rows of
    nearly every chunk."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        parts = [part for chunk in chunks for part in chunk.parts]
        self._handles = {part.place.maker: part.place.handle for part in parts}
        numbers = {maker: number for number, maker in enumerate(self._handles)}
        self._makers = list(self._handles)
        self._maker_of = np.array([numbers[part.place.maker] for part in parts], np.int64)
        self._keys = np.array([part.place.key for part in parts], np.int64)
        self._first = np.array([part.first for part in parts], np.int64)
        lengths = [chunk.parts[-1].last for chunk in chunks]
        self._begins = np.cumsum([0, *lengths])
        """Of each chunk, and the end of the last one, where the rows of all are counted through."""
        begins = np.repeat(self._begins[:-1], [len(chunk.parts) for chunk in chunks])
        self._ends = begins + np.array([part.last for part in parts], np.int64)

    @property
    def handles(self) -> list[Any]:
        """Handles of all makers."""
        return list(self._handles.values())

    def wanted(self, rows: Rows, told: set[str], timeout_seconds: float) -> Wanted:
        """What a reader fetches that has heard of the makers `told`."""
        begins = np.repeat(self._begins[rows.chunks], np.diff(rows.offsets))
        part_of = np.searchsorted(self._ends, begins + rows.rows, side="right")
        edges = np.flatnonzero(np.diff(part_of, prepend=-1))
        makers, maker_of = np.unique(self._maker_of[part_of[edges]], return_inverse=True)
        names = [self._makers[number] for number in makers]
        return Wanted(
            names,
            maker_of,
            self._keys[part_of[edges]],
            np.append(edges, len(part_of)),
            rows.rows - self._first[part_of],
            {name: self._handles[name] for name in names if name not in told},
            timeout_seconds,
        )


@dataclass
class Delivery:
    """The driver's side of a group of readers: processes that `fetch`."""

    readers: Sequence[Any]
    watch: Watch
    _told: list[set[str]] = field(init=False)
    """Makers whose handles a reader has: each costs it a connection."""

    def __post_init__(self) -> None:
        self._told = [set() for _ in self.readers]

    def deliver(self, chunks: Sequence[BuffersRef], rows: Sequence[Rows]) -> list[tuple[Any, ...]]:
        """For every reader a reference of all its rows of `chunks`, chunk after chunk; none where it wants nothing.
        They have come: what reads them cannot fail for a maker that is lost.

        Raises: WorkerDiedError.
        """
        while True:
            made = [chunk for chunk in chunks if isinstance(chunk, Chunk)]
            where = Located(made) if made else None
            fetched = {
                number: _put(chunks, of_reader) if where is None else self._sent(number, where, of_reader)
                for number, of_reader in enumerate(rows)
                if len(of_reader.rows)
            }
            try:
                self.watch.get([come for come, _ in fetched.values()], [] if where is None else where.handles)
                return [(fetched[number][1],) if number in fetched else () for number in range(len(rows))]
            except WorkerDiedError:
                self.watch.blame_the_dead()
                if not made or not made[0].renew(made):
                    raise

    def _sent(self, reader: int, where: Located, rows: Rows) -> tuple[Any, Any]:
        """References of None, when all have come, and of them."""
        wanted, told = where.wanted(rows, self._told[reader], self.watch.dependent_seconds), self._told[reader]
        come, trajectories = self.readers[reader].fetch.remote(wanted)
        told.update(wanted.makers)
        return come, trajectories


def _put(chunks: Sequence[BuffersRef], rows: Rows) -> tuple[Any, Any]:
    """As Delivery._sent, of what the driver has made."""
    parts = zip(rows.chunks, np.split(rows.rows, rows.offsets[1:-1]), strict=True)
    made = [take_rows(cast("DriverChunk", chunks[number]).buffers, of_chunk) for number, of_chunk in parts]
    return ray.put(None), ray.put(join_rows(made))


def rows_by_rank(batch: Batch, num_dp_ranks: int) -> tuple[list[Rows], np.ndarray]:
    """What each data-parallel rank has of the batch's chunks, and where a sample then is in what is delivered to its
    rank: int32 [B]."""
    samples = np.unique(np.concatenate([*batch.updates, np.empty(0, np.int64)]))
    order = samples[np.lexsort((batch.rows[samples], batch.chunk_ids[samples], batch.dp_ranks[samples]))]
    starts = np.searchsorted(batch.dp_ranks[order], np.arange(num_dp_ranks + 1))
    rows = []
    for start, end in itertools.pairwise(starts):
        chunks, first = np.unique(batch.chunk_ids[order[start:end]], return_index=True)
        rows.append(Rows(chunks, np.append(first, end - start), batch.rows[order[start:end]]))
    places = np.zeros(len(batch), np.int32)
    places[order] = np.arange(len(order)) - starts[batch.dp_ranks[order]]
    return rows, places
