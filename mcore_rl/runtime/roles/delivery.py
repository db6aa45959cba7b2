"""How trajectories come from the process that made them to those that read them.

They lie in the object store of the maker's host. Each reader gets its own rows and nothing else: the maker cuts them
out, the first rank that needs them puts them together, and the tensor and pipeline peers of that rank read one object.
So a trajectory crosses to another host once, however many calls it came from, and a call to a rank has one reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import ray

from mcore_rl.data.trajectories import take_rows
from mcore_rl.types import Batch, BuffersRef, TrajectoryBuffers


class Chunk(Protocol):
    """What BuffersRef is: trajectories of one rollout call."""

    def cut(self, rows: Sequence[np.ndarray]) -> list[Any]:
        """A reference of TrajectoryBuffers for each array of rows."""
        ...


@dataclass(frozen=True)
class EngineChunk:
    """`count` trajectories that the process `maker` has left in the object store."""

    reference: Any
    maker: Any
    count: int

    def cut(self, rows: Sequence[np.ndarray]) -> list[Any]:
        if len(rows) == 1 and np.array_equal(rows[0], np.arange(self.count)):
            return [self.reference]
        parts = self.maker.cut.options(num_returns=len(rows)).remote(list(rows), self.reference)
        return [parts] if len(rows) == 1 else list(parts)


@dataclass(frozen=True)
class DriverChunk:
    """Trajectories that the driver has made itself, of texts."""

    buffers: TrajectoryBuffers

    def cut(self, rows: Sequence[np.ndarray]) -> list[Any]:
        return [ray.put(take_rows(self.buffers, wanted)) for wanted in rows]


def cut_rows(chunk: TrajectoryBuffers, rows: Sequence[np.ndarray]) -> Any:
    """What a maker returns, as many objects as there are arrays of rows."""
    parts = [take_rows(chunk, wanted) for wanted in rows]
    return parts if len(parts) > 1 else parts[0]


def cut_for_readers(chunks: Sequence[BuffersRef], rows: Sequence[Sequence[np.ndarray]]) -> list[list[Any]]:
    """For every reader a reference for each chunk of which it wants something: `rows[reader][chunk]`, in that order."""
    parts: list[list[Any]] = [[] for _ in rows]
    for number, chunk in enumerate(cast("Sequence[Chunk]", chunks)):
        takers = [reader for reader, of_reader in enumerate(rows) if len(of_reader[number])]
        if takers:
            references = chunk.cut([rows[reader][number] for reader in takers])
            for reader, reference in zip(takers, references, strict=True):
                parts[reader].append(reference)
    return parts


def deliver(
    chunks: Sequence[BuffersRef], rows: Sequence[Sequence[np.ndarray]], readers: Sequence[Any]
) -> list[list[Any]]:
    """For every reader one reference of all its rows, chunk after chunk; none where it wants nothing. The processes
    `readers` put them together."""
    return [
        [reader.join.remote(*parts)] if len(parts) > 1 else parts
        for reader, parts in zip(readers, cut_for_readers(chunks, rows), strict=True)
    ]


def rows_by_rank(batch: Batch, num_dp_ranks: int) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """What each data-parallel rank has of each chunk, `rows[dp][chunk]`, and where a sample then is in what is
    delivered to its rank: int32 [B]."""
    samples = np.unique(np.concatenate([*batch.updates, np.empty(0, np.int64)]))
    order = samples[np.lexsort((batch.rows[samples], batch.chunk_ids[samples], batch.dp_ranks[samples]))]
    cells = batch.dp_ranks[order].astype(np.int64) * len(batch.chunks) + batch.chunk_ids[order]
    counts = np.bincount(cells, minlength=num_dp_ranks * len(batch.chunks))
    per_cell = np.split(batch.rows[order], np.cumsum(counts)[:-1])
    rows = [per_cell[dp * len(batch.chunks) : (dp + 1) * len(batch.chunks)] for dp in range(num_dp_ranks)]
    starts = np.searchsorted(batch.dp_ranks[order], np.arange(num_dp_ranks))
    places = np.zeros(len(batch), np.int32)
    places[order] = np.arange(len(order)) - starts[batch.dp_ranks[order]]
    return rows, places
