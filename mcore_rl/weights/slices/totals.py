"""Bytes that a weight sync transfers per rank, computed from the routes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcore_rl.weights.slices.routes import RouteMap, SliceRouter
from mcore_rl.weights.slices.senders import BoolArray, RankLocations
from mcore_rl.weights.slices.shard_map import WHOLE, IntArray, ShardMap, piece_bytes


@dataclass(frozen=True, eq=False)
class Totals:
    """Bytes of one sync.

    received: bytes that each engine rank receives; received_across: the part that comes from other hosts.
    sent: bytes that each trainer rank sends to other devices; sent_across: the part that goes to other hosts.
    needed: bytes that each rank of one engine keeps, computed from the engine's layout only.
    peers: number of other devices with which each device exchanges weights: the devices of the trainer ranks, then of
    the engine ranks. An engine rank on a trainer rank's device counts as that trainer rank, and its own entry is 0. A
    rank without a device counts as one.
    """

    received: IntArray
    received_across: IntArray
    sent: IntArray
    sent_across: IntArray
    needed: IntArray
    peers: IntArray
    buckets: int


def count(route_map: RouteMap, bucket_bytes: int, *, frozen: bool = True) -> Totals:
    """Count the bytes of one sync; without `frozen` weights if engines hold them already.

    Raises: LayoutError if one index of a tensor is larger than a bucket.
    """
    router, shard_map, locations = SliceRouter(route_map), route_map.shard_map, route_map.locations
    num_engine_ranks, num_trainer_ranks = len(locations.engine_hosts), len(locations.trainer_hosts)
    received, received_across = np.zeros((2, num_engine_ranks), np.int64)
    sent, sent_across = np.zeros((2, num_trainer_ranks), np.int64)
    pairs = np.zeros((num_trainer_ranks, num_engine_ranks), bool)
    buckets = set()
    for bucket, piece in shard_map.pieces(bucket_bytes):
        if shard_map.is_frozen(piece.bound) and not frozen:
            continue
        buckets.add(bucket)
        for route in router.routes(piece):
            received[route.receivers] += route.num_bytes  # receivers of a route are distinct, so += is safe
            devices = locations.trainer_devices[route.senders]
            away = (devices < 0) | (devices != locations.engine_devices[route.receivers])
            pairs[route.senders[away], route.receivers[away]] = True
            sent += _by_rank(route.senders[away], route.num_bytes[away], num_trainer_ranks)
            apart = locations.trainer_hosts[route.senders] != locations.engine_hosts[route.receivers]
            sent_across += _by_rank(route.senders[apart], route.num_bytes[apart], num_trainer_ranks)
            received_across[route.receivers[apart]] += route.num_bytes[apart]
    peers = _num_peers(pairs, locations)
    return Totals(received, received_across, sent, sent_across, _needed(shard_map, frozen=frozen), peers, len(buckets))


def _num_peers(pairs: BoolArray, locations: RankLocations) -> IntArray:
    """Count the partners of each device. pairs[t, e]: trainer rank t sends to engine rank e on another device."""
    num_trainer_ranks, num_engine_ranks = pairs.shape
    rank_of_device = {device: rank for rank, device in enumerate(locations.trainer_devices.tolist()) if device >= 0}
    targets = np.array([
        rank_of_device.get(device, num_trainer_ranks + rank)
        for rank, device in enumerate(locations.engine_devices.tolist())
    ])  # fmt: skip
    together = np.zeros((num_trainer_ranks + num_engine_ranks,) * 2, bool)
    senders, receivers = np.nonzero(pairs)
    together[senders, targets[receivers]] = True
    return (together | together.T).sum(axis=1)


def _needed(shard_map: ShardMap, *, frozen: bool) -> IntArray:
    needed = np.zeros(shard_map.layout.num_ranks, np.int64)
    for bound in (bound for bound in shard_map.rows if frozen or not shard_map.is_frozen(bound)):
        consumers = shard_map.consumers(bound)
        of_shards = piece_bytes(bound.row, WHOLE, consumers.num_shards, shard_map.encoding(bound))
        needed[consumers.ranks] += of_shards[consumers.shards]
    return needed


def _by_rank(ranks: IntArray, num_bytes: IntArray, num_ranks: int) -> IntArray:
    return np.bincount(ranks, weights=num_bytes, minlength=num_ranks).astype(np.int64)
