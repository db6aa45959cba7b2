"""Bytes that a weight sync transfers per rank, computed from the routes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcore_rl.weights.slices.routes import RankLocations, SliceRouter
from mcore_rl.weights.slices.shard_map import WHOLE, IntArray, ShardMap, piece_bytes
from model_converters.mapping.placement import Placement


@dataclass(frozen=True, eq=False)
class Totals:
    """Bytes of one sync.

    received: bytes that each engine rank receives; received_across: the part that comes from other hosts.
    sent: bytes that each trainer rank sends to other devices; sent_across: the part that goes to other hosts.
    needed: bytes that each rank of one engine keeps, computed from the engine's layout only.
    """

    received: IntArray
    received_across: IntArray
    sent: IntArray
    sent_across: IntArray
    needed: IntArray
    buckets: int


def count(placement: Placement, shard_map: ShardMap, locations: RankLocations, bucket_bytes: int) -> Totals:
    """Count the bytes of one sync.

    Raises: LayoutError if one index of a tensor is larger than a bucket.
    """
    router = SliceRouter(placement, shard_map, locations)
    num_engine_ranks, num_trainer_ranks = len(locations.engine_hosts), len(locations.trainer_hosts)
    received, received_across = np.zeros((2, num_engine_ranks), np.int64)
    sent, sent_across = np.zeros((2, num_trainer_ranks), np.int64)
    buckets = 0
    for bucket, piece in shard_map.pieces(bucket_bytes):
        buckets = bucket + 1
        for route in router.routes(piece):
            received[route.receivers] += route.num_bytes  # receivers of a route are distinct, so += is safe
            devices = locations.trainer_devices[route.senders]
            away = (devices < 0) | (devices != locations.engine_devices[route.receivers])
            sent += _by_rank(route.senders[away], route.num_bytes[away], num_trainer_ranks)
            apart = locations.trainer_hosts[route.senders] != locations.engine_hosts[route.receivers]
            sent_across += _by_rank(route.senders[apart], route.num_bytes[apart], num_trainer_ranks)
            received_across[route.receivers[apart]] += route.num_bytes[apart]
    return Totals(received, received_across, sent, sent_across, _needed(shard_map), buckets)


def _needed(shard_map: ShardMap) -> IntArray:
    needed = np.zeros(shard_map.layout.num_ranks, np.int64)
    for bound in shard_map.rows:
        consumers = shard_map.consumers(bound)
        needed[consumers.ranks] += piece_bytes(bound.row, WHOLE, consumers.num_shards, bound.dtype.itemsize)[
            consumers.shards
        ]
    return needed


def _by_rank(ranks: IntArray, num_bytes: IntArray, num_ranks: int) -> IntArray:
    return np.bincount(ranks, weights=num_bytes, minlength=num_ranks).astype(np.int64)
