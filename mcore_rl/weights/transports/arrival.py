"""Store of a transfer group: members write a key there before they connect, and the driver writes one after a loss.

gloo and NCCL wait for a member that never connects. Members therefore connect only after the keys of all members exist,
and the driver's key ends every later wait (nccl_group.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from mcore_rl.errors import PeerLostError

_ARRIVED, _COMPLETE, _LOST = "arrived", "complete", "lost"
"""Keys of the store: the number of members that have arrived, whether all have, and the reason of a loss."""
MAX_NAMED = 4
"""Maximum number of missing members that an error names."""


@dataclass(frozen=True)
class Rendezvous:
    """Address of the store at which the members of a transfer group connect.

    `generation` must be new for every group: with the prefix of an earlier group the members would find its addresses.
    """

    host: str
    port: int
    generation: int

    def open(self, timeout_seconds: float) -> dist.Store:
        """Connect to the group's part of the store. A thread that waits for a key blocks all other calls of the
        returned object, so a second user needs its own.

        Raises: RuntimeError without an answer within the timeout.
        """
        timeout = timedelta(seconds=timeout_seconds)
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=timeout)
        return _part_of(store, self.generation)


def await_members(
    store: dist.Store, member: int, num_members: int, *, timeout_seconds: float, name: Callable[[int], str]
) -> None:
    """Arrive as number `member`, and wait until all members have.

    Raises: PeerLostError with the names of missing members after the timeout, or with the reason of an announced loss.
    """
    store.set(_key_of(member), "")
    if store.add(_ARRIVED, 1) == num_members:
        store.set(_COMPLETE, "")
    try:
        store.wait([_COMPLETE], timedelta(seconds=timeout_seconds))
    except RuntimeError:
        missing = [name(each) for each in range(num_members) if not store.check([_key_of(each)])]
        if missing:  # else the last one has arrived since the timeout
            more = f" and {len(missing) - MAX_NAMED} more" * (len(missing) > MAX_NAMED)
            named = ", ".join(missing[:MAX_NAMED]) + more
            raise PeerLostError(f"no connection within {timeout_seconds:g} s from {named}") from None
    raise_announced(store)


def announce_loss(store: dist.Store, generation: int, reason: str) -> None:
    """End the waits of all members of transfer group number `generation`: each raises a PeerLostError with `reason`.

    NCCL does not notice that a process on the same node has died.
    """
    announce(_part_of(store, generation), reason)


def announce(store: dist.Store, reason: str) -> None:
    """Announce a loss to all members of the group whose part of the store this is."""
    store.compare_set(_LOST, "", reason)  # the first reason stays
    store.set(_COMPLETE, "")  # members that still wait for others look at the reason, too


def raise_announced(store: dist.Store) -> None:
    """Raises: PeerLostError if a loss was announced."""
    if store.check([_LOST]):
        raise PeerLostError(f"the weight sync has lost a process: {store.get(_LOST).decode()}")


def _part_of(store: dist.Store, generation: int) -> dist.Store:
    return dist.PrefixStore(f"weights/{generation}", store)


def _key_of(member: int) -> str:
    return f"{_ARRIVED}/{member}"
