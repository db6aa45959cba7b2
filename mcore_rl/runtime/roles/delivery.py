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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import ray
from ray.exceptions import GetTimeoutError

from mcore_rl.data.trajectories import join_rows, take_rows
from mcore_rl.errors import McoreRLError, PeerLostError
from mcore_rl.types import Batch, BuffersRef, TrajectoryBuffers


@dataclass(frozen=True)
class Chunk:
    """A BuffersRef of one rollout call: the process `handle`, whose name is `maker`, keeps its trajectories."""

    maker: str
    handle: Any
    key: int


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

    def keep(self, buffers: TrajectoryBuffers) -> int:
        key = next(self._keys)
        self._chunks[key] = buffers
        return key

    def forget(self, keys: Sequence[int]) -> None:
        for key in keys:
            del self._chunks[key]

    def cut(self, key: int, rows: np.ndarray) -> TrajectoryBuffers:
        """Raises: McoreRLError for what is not here (any more)."""
        if key not in self._chunks:
            raise McoreRLError(f"{self._name} has no trajectories under {key}")
        return take_rows(self._chunks[key], rows)


@dataclass
class Forgotten:
    """The driver's side: what makers keep and nobody refers to any more, by maker."""

    _keys: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def refer(self, maker: str, handle: Any, key: int) -> BuffersRef:
        chunk = Chunk(maker, handle, key)
        weakref.finalize(chunk, self._keys[maker].append, key).atexit = False
        return BuffersRef(chunk)

    def take(self, maker: str) -> list[int]:
        """Since the last call."""
        keys = self._keys[maker]
        taken = keys[:]
        del keys[: len(taken)]
        return taken


@dataclass(frozen=True)
class Wanted:
    """What a reader fetches: `rows[offsets[i]:offsets[i + 1]]` of what `makers[i]` keeps under `keys[i]`. `handles`: of
    makers that it has not heard of."""

    makers: list[str]
    keys: list[int]
    offsets: np.ndarray
    rows: np.ndarray
    handles: dict[str, Any]
    timeout_seconds: float


def fetch(wanted: Wanted, handles: dict[str, Any]) -> TrajectoryBuffers:
    """A reader's side: all of it, chunk after chunk. `handles` of makers are kept from call to call.

    Raises: PeerLostError naming a maker that does not answer.
    """
    handles |= wanted.handles
    rows = np.split(wanted.rows, wanted.offsets[1:-1])
    calls = [
        handles[maker].cut.remote(key, of_chunk)
        for maker, key, of_chunk in zip(wanted.makers, wanted.keys, rows, strict=True)
    ]
    try:
        return join_rows(ray.get(calls, timeout=wanted.timeout_seconds))
    except GetTimeoutError:
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        silent = sorted({maker for maker, call in zip(wanted.makers, calls, strict=True) if call not in ready})
        raise PeerLostError(f"no trajectories came from {', '.join(silent)} in {wanted.timeout_seconds:g} s") from None


@dataclass
class Delivery:
    """The driver's side of a group of readers: processes that `fetch`."""

    readers: Sequence[Any]
    timeout_seconds: float
    _told: list[set[str]] = field(init=False)
    """Makers whose handles a reader has: each costs it a connection."""

    def __post_init__(self) -> None:
        self._told = [set() for _ in self.readers]

    def deliver(self, chunks: Sequence[BuffersRef], rows: Sequence[Sequence[np.ndarray]]) -> list[tuple[Any, ...]]:
        """For every reader a reference of all its rows, `rows[reader][chunk]`, chunk after chunk; none where it wants
        nothing."""
        return [
            (self._sent(number, chunks, of_reader),) if any(map(len, of_reader)) else ()
            for number, of_reader in enumerate(rows)
        ]

    def _sent(self, reader: int, chunks: Sequence[BuffersRef], rows: Sequence[np.ndarray]) -> Any:
        pairs = [(chunk, of_chunk) for chunk, of_chunk in zip(chunks, rows, strict=True) if len(of_chunk)]
        own = [take_rows(chunk.buffers, of_chunk) for chunk, of_chunk in pairs if isinstance(chunk, DriverChunk)]
        if own:
            assert len(own) == len(pairs), "trajectories of engines and of texts in one batch"
            return ray.put(join_rows(own))
        made = cast("list[Chunk]", [chunk for chunk, _ in pairs])
        parts = [of_chunk for _, of_chunk in pairs]
        told = self._told[reader]
        wanted = Wanted(
            [chunk.maker for chunk in made],
            [chunk.key for chunk in made],
            np.cumsum([0, *map(len, parts)]),
            np.concatenate(parts),
            {chunk.maker: chunk.handle for chunk in made if chunk.maker not in told},
            self.timeout_seconds,
        )
        told.update(wanted.handles)
        return self.readers[reader].fetch.remote(wanted)


def rows_by_rank(batch: Batch, num_dp_ranks: int) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """What each data-parallel rank has of each chunk, `rows[dp][chunk]`, and where a sample then is in what is
    delivered to its rank: int32 [B]."""
    samples = np.unique(np.concatenate([*batch.updates, np.empty(0, np.int64)]))
    order = samples[np.lexsort((batch.rows[samples], batch.chunk_ids[samples], batch.dp_ranks[samples]))]
    cells = batch.dp_ranks[order].astype(np.int64) * len(batch.chunks) + batch.chunk_ids[order]
    counts = np.bincount(cells, minlength=num_dp_ranks * len(batch.chunks))
    rows_in_order, ends = batch.rows[order], np.cumsum(counts).tolist()
    # Not np.split, which takes four times as long: there are as many cells as chunks times ranks.
    per_cell = [rows_in_order[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    rows = [per_cell[dp * len(batch.chunks) : (dp + 1) * len(batch.chunks)] for dp in range(num_dp_ranks)]
    starts = np.searchsorted(batch.dp_ranks[order], np.arange(num_dp_ranks))
    places = np.zeros(len(batch), np.int32)
    places[order] = np.arange(len(order)) - starts[batch.dp_ranks[order]]
    return rows, places
