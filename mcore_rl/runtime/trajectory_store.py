"""Store of trajectories in the process that produced them, and requests of the processes that read them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import ray
from ray.exceptions import GetTimeoutError

from mcore_rl.data.trajectories import join_rows, ragged, take_rows
from mcore_rl.errors import McoreRLError, PeerLostError
from mcore_rl.runtime.calls import ProcessHandle
from mcore_rl.types import TrajectoryBuffers


class Producer(Protocol):
    """Process that keeps trajectories (EngineProcess)."""

    def cut(self, keys: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> TrajectoryBuffers:
        """Select rows (TrajectoryStore.cut)."""


class TrajectoryStore:
    """Trajectories that the producing process keeps."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._keys = itertools.count()
        self._kept: dict[int, tuple[TrajectoryBuffers, Sequence[str]]] = {}
        """Trajectories and the ids of their requests, by key."""

    def keep(self, buffers: TrajectoryBuffers, request_ids: Sequence[str] = ()) -> int:
        """Store trajectories with the ids of their requests; returns their key."""
        # Keys are never reused: a late request for released trajectories fails instead of reading others.
        key = next(self._keys)
        self._kept[key] = buffers, request_ids
        return key

    def all_of(self, key: int) -> TrajectoryBuffers:
        return self._kept[key][0]

    def request_ids(self, keys: Sequence[int]) -> list[str]:
        """Return the ids of the requests of trajectories."""
        return [request_id for key in keys for request_id in self._kept[key][1]]

    def release(self, keys: Sequence[int]) -> list[str]:
        """Delete trajectories; returns the ids of their requests."""
        request_ids = self.request_ids(keys)
        for key in keys:
            del self._kept[key]
        return request_ids

    def cut(self, keys: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> TrajectoryBuffers:
        """Join rows `rows[offsets[i]:offsets[i + 1]]` of the trajectories under `keys[i]`.

        Raises: McoreRLError for a key that does not exist (any more).
        """
        parts = []
        for key, of_key in zip(keys.tolist(), np.split(rows, offsets[1:-1]), strict=True):
            if key not in self._kept:
                raise McoreRLError(f"{self._name} has no trajectories under {key}")
            parts.append(take_rows(self._kept[key][0], of_key))
        return join_rows(parts)


@dataclass(frozen=True)
class FetchRequest:
    """Rows for a reader: `rows[offsets[i]:offsets[i + 1]]` of the trajectories under `keys[i]` of the producer
    `producers[producer_of[i]]`. `handles` has the producers that are new to the reader."""

    producers: list[str]
    producer_of: np.ndarray
    keys: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    handles: dict[str, ProcessHandle[Producer]]
    timeout_seconds: float


def fetch(request: FetchRequest, known: dict[str, ProcessHandle[Producer]]) -> TrajectoryBuffers:
    """Fetch all rows in their order, with one call per producer. The reader runs this; it keeps the handles of
    producers in `known` for later requests.

    Raises: PeerLostError naming a producer that does not answer.
    """
    known |= request.handles
    calls, places = [], []
    for number, producer in enumerate(request.producers):
        pieces = np.flatnonzero(request.producer_of == number)
        of_producer, offsets = ragged(request.offsets, pieces)
        cut = request.keys[pieces], offsets, request.rows[of_producer]
        calls.append(known[producer].call(Producer.cut, *cut))
        places.append(of_producer)
    try:
        joined = join_rows(ray.get(calls, timeout=request.timeout_seconds))
    except GetTimeoutError:
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        silent = sorted(producer for producer, call in zip(request.producers, calls, strict=True) if call not in ready)
        raise PeerLostError(f"no trajectories came from {', '.join(silent)} in {request.timeout_seconds:g} s") from None
    # The rows arrive grouped by producer; restore the order of the request.
    order = np.argsort(np.concatenate(places))
    return joined if np.array_equal(order, np.arange(len(order))) else take_rows(joined, order)
