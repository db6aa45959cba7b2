"""What a weight sync by own slices moves, counted for every rank before a byte moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcore_rl.weights.slices.needs import WHOLE, Needs, Ranks, chunk_bytes
from mcore_rl.weights.slices.routes import Places, Router
from model_converters.mapping.placement import Placement


@dataclass(frozen=True, eq=False)
class Totals:
    """Bytes of one sync: `received` by every engine rank, `sent` by every trainer rank to other devices, and of both
    what goes `across` from host to host. `needed`: what the ranks of one engine take of the model, computed from the
    engine's layout alone."""

    received: Ranks
    received_across: Ranks
    sent: Ranks
    sent_across: Ranks
    needed: Ranks
    buckets: int


def count(placement: Placement, needs: Needs, places: Places, bucket_bytes: int) -> Totals:
    """Raises: LayoutError where one index of a tensor is larger than a bucket."""
    router = Router(placement, needs, places)
    num_engine_ranks, num_trainer_ranks = len(places.engine_hosts), len(places.trainer_hosts)
    received, received_across = np.zeros((2, num_engine_ranks), np.int64)
    sent, sent_across = np.zeros((2, num_trainer_ranks), np.int64)
    buckets = 0
    for bucket, chunk in needs.chunks(bucket_bytes):
        buckets = bucket + 1
        for route in router.routes(chunk):
            received[route.receivers] += route.num_bytes  # a rank is once among the receivers of a route
            devices = places.trainer_devices[route.senders]
            away = (devices < 0) | (devices != places.engine_devices[route.receivers])
            sent += _by_rank(route.senders[away], route.num_bytes[away], num_trainer_ranks)
            apart = places.trainer_hosts[route.senders] != places.engine_hosts[route.receivers]
            sent_across += _by_rank(route.senders[apart], route.num_bytes[apart], num_trainer_ranks)
            received_across[route.receivers[apart]] += route.num_bytes[apart]
    return Totals(received, received_across, sent, sent_across, _needed(needs), buckets)


def _needed(needs: Needs) -> Ranks:
    needed = np.zeros(needs.layout.num_ranks, np.int64)
    for bound in needs.rows:
        takers = needs.takers(bound)
        needed[takers.ranks] += chunk_bytes(bound.row, WHOLE, takers.num_shards, bound.dtype.itemsize)[takers.shards]
    return needed


def _by_rank(ranks: Ranks, num_bytes: Ranks, num_ranks: int) -> Ranks:
    return np.bincount(ranks, weights=num_bytes, minlength=num_ranks).astype(np.int64)
