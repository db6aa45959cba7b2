"""Choice of the senders of a weight sync among the trainer ranks that hold the same shard.

An engine rank receives from the holder on its device, else from one on its host, else from few holders elsewhere: each
pair of GPUs that exchange weights needs a connection, which NCCL sets up in 10 to 30 ms and gives buffers of its own.
Holders elsewhere have equal numbers of receivers, on the same rail (number of the GPU within its host) if possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.weights.slices.shard_map import IntArray

BoolArray = npt.NDArray[np.bool_]

ELSEWHERE = (-1, -1)
"""Host and device number of a receiver that shares neither with a trainer rank."""
MAX_IMBALANCE = 1.25
"""Maximum load of a holder, in multiples of the mean, for which receivers prefer their peers to other holders."""


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

    def rails(self) -> tuple[IntArray, IntArray]:
        """Return the number of each rank's device within its host, for trainer ranks and engine ranks."""
        hosts = np.concatenate([self.trainer_hosts, self.engine_hosts])
        devices = np.concatenate([self.trainer_devices, self.engine_devices])
        places, inverse = np.unique(np.stack([hosts, devices]), axis=1, return_inverse=True)
        # The places are sorted by host and device, so a rail is the distance to the first place of the host.
        rails = (np.arange(places.shape[1]) - np.searchsorted(places[0], places[0]))[inverse.ravel()]
        return rails[: len(self.trainer_hosts)], rails[len(self.trainer_hosts) :]


def choose_senders(
    num_bytes: Mapping[range, IntArray], locations: RankLocations, ranks_per_engine: int
) -> dict[range, IntArray]:
    """Choose the possible senders of every shard. Deterministic.

    num_bytes: bytes that every engine rank receives of the shard, by the range of its holders.
    Returns an array [engine ranks, number of possible senders] of trainer ranks for every range with several holders.
    Rows of engine ranks with fewer senders repeat them.
    """
    num_engine_ranks = len(locations.engine_hosts)
    trainer_rails, engine_rails = locations.rails()
    peers = np.zeros((num_engine_ranks, len(locations.trainer_hosts)), bool)
    chosen = {}
    # Shards with the fewest holders first: the others then prefer senders that are peers already.
    for holders in sorted(num_bytes, key=lambda each: (len(each), each.start, each.step)):
        ranks, candidates = np.flatnonzero(num_bytes[holders]), np.array(holders)
        if len(holders) > 1:
            candidates = candidates[np.argsort(trainer_rails[candidates], kind="stable")]
            # The same rank of all engines holds the same experts, so these have the same peers.
            ranks = ranks[np.lexsort((ranks, ranks % ranks_per_engine, engine_rails[ranks]))]
            nearest = _nearest(holders, ranks, locations)
            senders, far = nearest[:, None], nearest < 0
            if far.any():
                receivers = ranks[far]
                of_far = _among_peers(candidates, num_bytes[holders][receivers], peers[receivers][:, candidates])
                senders = np.repeat(senders, of_far.shape[1], axis=1)
                senders[far] = of_far
            chosen[holders] = np.full((num_engine_ranks, senders.shape[1]), holders[0])
            chosen[holders][ranks] = senders
        else:
            senders = np.full((len(ranks), 1), holders[0])
        peers[ranks[:, None], senders] = True
    return chosen


def _among_peers(candidates: IntArray, num_bytes: IntArray, known: BoolArray) -> IntArray:
    """Divide candidates among receivers, preferably those that a receiver knows: known[receiver, candidate].

    Returns the candidates of each receiver.
    """
    if known.any():
        known[~known.any(axis=1)] = True
        rows, inverse = np.unique(known, axis=0, return_inverse=True)
        groups = [np.flatnonzero(inverse.ravel() == number) for number in range(len(rows))]
        shares = [_shares(candidates[row], num_bytes[of_row]) for row, of_row in zip(rows, groups, strict=True)]
        senders = np.empty((len(known), max(share.shape[1] for share in shares)), np.int64)
        load = np.zeros(int(candidates.max()) + 1)
        for row, of_row, share in zip(rows, groups, shares, strict=True):
            # Rows of fewer candidates repeat the last one.
            senders[of_row] = share[:, np.minimum(np.arange(senders.shape[1]), share.shape[1] - 1)]
            load[candidates[row]] += num_bytes[of_row].sum() / row.sum()
        if load.max() * len(candidates) <= MAX_IMBALANCE * num_bytes.sum():
            return senders
    return _shares(candidates, num_bytes)


def _shares(candidates: IntArray, num_bytes: IntArray) -> IntArray:
    """Divide candidates among receivers so that they send about equally many bytes."""
    # Both are intervals of the same line. A short overlap is left out: a connection costs more than an imbalance of an
    # eighth.
    ends = np.cumsum(num_bytes)
    total, margin = ends[-1], np.minimum((num_bytes - 1) // 2, ends[-1] // len(candidates) // 8)
    first = (ends - num_bytes + margin) * len(candidates) // total
    last = -(-(ends - margin) * len(candidates) // total) - 1
    width = int((last - first).max()) + 1
    return candidates[np.minimum(first[:, None] + np.arange(width), last[:, None])]


def _nearest(holders: range, ranks: IntArray, locations: RankLocations) -> IntArray:
    """Return a holder for each of these engine ranks: on its device, else on its host (round-robin), else -1."""
    on_device = {int(locations.trainer_devices[rank]): rank for rank in holders if locations.trainer_devices[rank] >= 0}
    on_host: dict[int, list[int]] = {}
    for rank in holders:
        on_host.setdefault(int(locations.trainer_hosts[rank]), []).append(rank)
    last_used: dict[int, int] = {}
    nearest = []
    hosts, devices = locations.engine_hosts[ranks].tolist(), locations.engine_devices[ranks].tolist()
    for host, device in zip(hosts, devices, strict=True):
        sender = on_device.get(device, -1)
        if sender < 0 and host in on_host:
            index = last_used[host] = last_used.get(host, -1) + 1
            sender = on_host[host][index % len(on_host[host])]
        nearest.append(sender)
    return np.array(nearest, np.int64)
