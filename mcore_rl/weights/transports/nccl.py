"""Channel between GPUs of different processes, through NCCL.

NCCL has no tags: two processes must issue their messages to each other in the same order, which is by round and, within
a round, by staging buffer. All sends and receives of a process in one round are launched as one group. Separate calls
would each occupy a part of the GPU until their peer is ready; enough of them on two GPUs leave no room for the calls
that they wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from mcore_rl.weights.transports.arrival import Rendezvous
from mcore_rl.weights.transports.link import MessageKind, MessageTag, PeerLostOnError
from mcore_rl.weights.transports.nccl_group import NcclGroup

PEERS_AT_ONCE = 32
"""Maximum peers in each direction to which a process connects in one launch. Over InfiniBand, NCCL needs 10 to 30 ms
per peer, and the timeout counts for one launch."""


@dataclass
class NcclTransfer:
    """A send or receive that is queued for the next launch, or in flight."""

    memory: torch.Tensor
    group: NcclGroup
    timeout_seconds: float
    on_error: PeerLostOnError
    work: dist.Work | None = field(default=None, init=False)

    def wait(self) -> None:
        """Block until the transfer is complete (see GlooTransfer.wait)."""
        assert self.work is not None, "wait() was called before launch()"
        with self.on_error:
            self.group.wait(self.work, self.timeout_seconds)


class NcclChannel:
    """Channel over NCCL of member number `member`. `ranks`: rank in the NCCL group by member of the transfer group."""

    def __init__(
        self,
        group: NcclGroup,
        member: int,
        ranks: Mapping[int, int],
        device: torch.device,
        *,
        timeout_seconds: float,
        name: Callable[[int], str],
    ) -> None:
        self.device = device
        self._group = group
        self._member = member
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self._name = name
        self._queued: list[tuple[Callable[[], None], NcclTransfer]] = []

    @classmethod
    def connect(
        cls,
        rendezvous: Rendezvous,
        member: int,
        members: Sequence[int],
        *,
        timeout_seconds: float,
        name: Callable[[int], str],
    ) -> NcclChannel:
        """Create the NCCL group of `members`, each of which has its own GPU.

        Collective: `members`.
        Raises: PeerLostError if a member is missing.
        """
        device = this_gpu()
        ranks = {each: number for number, each in enumerate(members)}
        group = NcclGroup(rendezvous, ranks[member], len(ranks), device, timeout_seconds=timeout_seconds)
        return cls(group, member, ranks, device, timeout_seconds=timeout_seconds, name=name)

    def handshake(self, targets: Collection[int], sources: Collection[int]) -> None:
        """Connect to the members to which this process will send, and to those from which it will receive.

        NCCL connects two GPUs at their first message. Without the handshake that is part of the first update.

        Collective: all members.
        Raises: PeerLostError.
        """
        members, here = list(self._ranks), self._ranks[self._member]
        tag = MessageTag(MessageKind.HANDSHAKE, 0, 0)
        # In every launch all members go through the same distances between sender and receiver, so each message meets
        # its other half in the launch of the same number.
        for first in range(1, len(members), PEERS_AT_ONCE):
            transfers = []
            for distance in range(first, min(first + PEERS_AT_ONCE, len(members))):
                target, source = members[(here + distance) % len(members)], members[here - distance]
                if target in targets:
                    transfers.append(self.send(self._byte(), target, tag))
                if source in sources:
                    transfers.append(self.receive(self._byte(), source, tag))
            self._launch(self._group.launch_first)
            for transfer in transfers:
                transfer.wait()

    def send(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> NcclTransfer:
        return self._queue(partial(self._group.send, memory, self._ranks[peer]), memory, peer)

    def receive(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> NcclTransfer:
        return self._queue(partial(self._group.receive, memory, self._ranks[peer]), memory, peer)

    def launch(self) -> None:
        """Start all queued transfers as one NCCL group.

        Raises: PeerLostError.
        """
        self._launch(self._group.launch)

    def _launch(self, start: Callable[[Sequence[Callable[[], None]]], dist.Work]) -> None:
        queued, self._queued = self._queued, []
        if not queued:
            return
        with PeerLostOnError(", ".join(dict.fromkeys(transfer.on_error.peer for _, transfer in queued))):
            work = start([operation for operation, _ in queued])
        for _, transfer in queued:
            transfer.work = work

    def abandon(self, reason: str) -> None:
        """End all transfers of all members, which then raise a PeerLostError with `reason`. The members must connect
        again."""
        self._group.abandon(reason)

    def close(self) -> None:
        """End this process's part of the group, whose other members do not use it any more."""
        self._group.close()

    def _queue(self, operation: Callable[[], None], memory: torch.Tensor, peer: int) -> NcclTransfer:
        # The tag of a message is unused: NCCL matches messages by their order.
        transfer = NcclTransfer(memory, self._group, self._timeout_seconds, PeerLostOnError(self._name(peer)))
        self._queued.append((operation, transfer))
        return transfer

    def _byte(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8, device=self.device)


def this_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
