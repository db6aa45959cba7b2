"""Delivery of trajectories from the processes that produced them to the ranks that read them.

Trajectories stay in the process that produced them until the driver releases them. A reader fetches only its own rows:
each producer selects the rows, the reader joins them, and its tensor and pipeline peers read the same object. Thus a
trajectory is sent to another host once, and the driver makes one call per reader, not one per producer and reader.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import ray

from mcore_rl.data.trajectories import join_rows, take_rows
from mcore_rl.errors import WorkerDiedError
from mcore_rl.runtime.calls import ProcessHandle, Ref
from mcore_rl.runtime.health import Watch
from mcore_rl.runtime.roles.base import RunProcess
from mcore_rl.runtime.trajectory_store import FetchRequest
from mcore_rl.types import Batch, BuffersRef, RolloutTask, TrajectoryBuffers

if TYPE_CHECKING:
    from mcore_rl.runtime.engines.process import EngineProcess


@dataclass(frozen=True)
class TrajectoryPlace:
    """Trajectories under `key` in the process named `producer`, which keeps them as long as this object exists."""

    producer: str
    process: ProcessHandle[EngineProcess]
    key: int


@dataclass(frozen=True)
class Part:
    """Rows from `first` up to `last` (exclusive) of a chunk: the trajectories of the range `responses` of the task. A
    response may have several trajectories. `digests` as in RolloutScalars."""

    place: TrajectoryPlace
    first: int
    last: int
    responses: tuple[int, int]
    digests: np.ndarray | None = None


@dataclass
class Chunk:
    """A BuffersRef of one task's trajectories, in the order of `parts`. `task` regenerates lost ones."""

    parts: list[Part]
    task: RolloutTask


@dataclass(frozen=True)
class DriverChunk:
    """A BuffersRef of trajectories that the driver made from texts."""

    buffers: TrajectoryBuffers


@dataclass
class ReleasedKeys:
    """Keys of trajectories that nothing on the driver refers to any more, by producer."""

    _keys: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def refer(self, producer: str, process: ProcessHandle[EngineProcess], key: int) -> TrajectoryPlace:
        """Return a reference to trajectories. Their key is released when the reference is garbage-collected."""
        place = TrajectoryPlace(producer, process, key)
        # Not at exit: the producers end with the driver.
        weakref.finalize(place, self._keys[producer].append, key).atexit = False
        return place

    def take(self, producer: str) -> list[int]:
        """Pop the keys released since the last call."""
        keys = self._keys[producer]
        # A finalizer may append at any point, so remove exactly what was copied.
        taken = keys[:]
        del keys[: len(taken)]
        return taken


@dataclass(frozen=True)
class Rows:
    """Rows of some chunks: `rows[offsets[i]:offsets[i + 1]]` of chunk number `chunks[i]`."""

    chunks: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray

    @staticmethod
    def of(by_chunk: Sequence[np.ndarray]) -> Rows:
        """Convert one array of rows per chunk."""
        numbers = np.array([number for number, rows in enumerate(by_chunk) if len(rows)], np.int64)
        nonempty = [by_chunk[number] for number in numbers]
        return Rows(numbers, np.cumsum([0, *map(len, nonempty)]), np.concatenate([*nonempty, np.empty(0, np.int64)]))


class TrajectoryIndex:
    """Places of the rows of chunks, as arrays over all parts, because every reader needs rows of nearly every chunk."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        parts = [part for chunk in chunks for part in chunk.parts]
        self._handles = {part.place.producer: part.place.process for part in parts}
        numbers = {producer: number for number, producer in enumerate(self._handles)}
        self._producers = list(self._handles)
        self._producer_of = np.array([numbers[part.place.producer] for part in parts], np.int64)
        self._keys = np.array([part.place.key for part in parts], np.int64)
        self._first = np.array([part.first for part in parts], np.int64)
        lengths = [chunk.parts[-1].last for chunk in chunks]
        self._begins = np.cumsum([0, *lengths])
        """First row of each chunk among the rows of all chunks, and the number of all rows."""
        begins = np.repeat(self._begins[:-1], [len(chunk.parts) for chunk in chunks])
        self._ends = begins + np.array([part.last for part in parts], np.int64)

    @property
    def processes(self) -> list[ProcessHandle[EngineProcess]]:
        """All producers."""
        return list(self._handles.values())

    def request(self, rows: Rows, known: set[str], timeout_seconds: float) -> FetchRequest:
        """Build the request of a reader that already has the handles of the producers `known`."""
        begins = np.repeat(self._begins[rows.chunks], np.diff(rows.offsets))
        # Consecutive rows of one part are one piece of the request; `edges` are the first rows of the pieces.
        part_of = np.searchsorted(self._ends, begins + rows.rows, side="right")
        edges = np.flatnonzero(np.diff(part_of, prepend=-1))
        producers, producer_of = np.unique(self._producer_of[part_of[edges]], return_inverse=True)
        names = [self._producers[number] for number in producers]
        return FetchRequest(
            names,
            producer_of,
            self._keys[part_of[edges]],
            np.append(edges, len(part_of)),
            rows.rows - self._first[part_of],
            {name: self._handles[name] for name in names if name not in known},
            timeout_seconds,
        )


@dataclass
class Delivery:
    """Delivery to a group of readers, from the driver's side."""

    readers: Sequence[ProcessHandle[RunProcess]]
    watch: Watch
    _known: list[set[str]] = field(init=False)
    """Producers whose handles each reader has; each producer costs the reader a connection."""

    def __post_init__(self) -> None:
        self._known = [set() for _ in self.readers]

    def deliver(self, chunks: Sequence[BuffersRef], rows: Sequence[Rows]) -> list[tuple[Ref[TrajectoryBuffers], ...]]:
        """Deliver rows and wait until all have arrived, so that the later loss of a producer does not matter.

        Returns, for each reader, a reference to its rows in the order of `chunks`; () for a reader without rows.

        Raises: WorkerDiedError.
        """
        return self.begin(chunks, rows).wait()

    def begin(self, chunks: Sequence[BuffersRef], rows: Sequence[Rows]) -> PendingDelivery:
        """Begin a delivery; see `deliver`."""
        # The driver made the chunks of supervised training itself; engines keep all others. A batch has one kind.
        produced = [chunk for chunk in chunks if isinstance(chunk, Chunk)]
        pending = PendingDelivery(self, produced, rows)
        if produced:
            pending.fetch()
        else:
            pending.delivered = [(_put(chunks, of_reader),) if len(of_reader.rows) else () for of_reader in rows]
        return pending

    def fetch_all(
        self, index: TrajectoryIndex, rows: Sequence[Rows]
    ) -> list[tuple[Ref[None], Ref[TrajectoryBuffers]] | None]:
        """Start to fetch the rows of all readers; see `_fetch`. None for a reader without rows."""
        return [
            self._fetch(number, index, of_reader) if len(of_reader.rows) else None
            for number, of_reader in enumerate(rows)
        ]

    def _fetch(self, reader: int, index: TrajectoryIndex, rows: Rows) -> tuple[Ref[None], Ref[TrajectoryBuffers]]:
        """Start to fetch rows. Returns two references: to None, ready when all rows have arrived, and to the rows."""
        known = self._known[reader]
        request = index.request(rows, known, self.watch.dependent_seconds)
        arrived, trajectories = self.readers[reader].call_for_two(RunProcess.fetch, request)
        known.update(request.producers)
        return arrived, trajectories


@dataclass
class PendingDelivery:
    """Rows on their way to the readers of `delivery`, while the driver may do other work."""

    delivery: Delivery
    produced: Sequence[Chunk]
    rows: Sequence[Rows]
    delivered: list[tuple[Ref[TrajectoryBuffers], ...]] = field(default_factory=list, init=False)
    """Result of `wait`, if no engine produced the rows."""

    def fetch(self) -> None:
        """Start to fetch all rows."""
        self._index = TrajectoryIndex(self.produced)
        self._calls = self.delivery.fetch_all(self._index, self.rows)

    def wait(self) -> list[tuple[Ref[TrajectoryBuffers], ...]]:
        """Wait until all rows have arrived; see Delivery.deliver. Rows that were lost with their engine are generated
        again, and all rows are fetched again."""
        watch = self.delivery.watch
        while self.produced:
            try:
                watch.get([calls[0] for calls in self._calls if calls is not None], self._index.processes)
                return [() if calls is None else (calls[1],) for calls in self._calls]
            except WorkerDiedError:
                watch.blame_the_dead()
                scheduler = watch.attendant
                if scheduler is None or not scheduler.renew(self.produced):
                    raise
            self.fetch()
        return self.delivered


def _put(chunks: Sequence[BuffersRef], rows: Rows) -> Ref[TrajectoryBuffers]:
    """Put rows of trajectories that the driver made into the object store."""
    parts = zip(rows.chunks, np.split(rows.rows, rows.offsets[1:-1]), strict=True)
    made = [take_rows(cast("DriverChunk", chunks[number]).buffers, of_chunk) for number, of_chunk in parts]
    return cast("Ref[TrajectoryBuffers]", ray.put(join_rows(made)))


def rows_by_rank(batch: Batch, num_dp_ranks: int) -> tuple[list[Rows], np.ndarray]:
    """Select the rows of the batch's chunks for each data-parallel rank. Also returns the position of each sample in
    the rows delivered to its rank, int32 [B]."""
    # With several epochs, a sample is in several updates. It is delivered once.
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
