"""Weights between GPUs of different processes, by NCCL. Not run on a GPU yet.

NCCL knows no tags: what two processes exchange, both must name in one order, which is that of turns and, within a turn,
of windows. All that a process sends and receives in a turn goes at once: single messages would each occupy a part of
the GPU until their peer is ready, and enough of them on two GPUs would leave no room for those that they wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.transports.link import Lost, Meeting, Topic


@dataclass
class Ticket:
    """A message that goes with the next launch, or is under way."""

    memory: torch.Tensor
    timeout: timedelta
    lost: AbstractContextManager[None]
    work: dist.Work | None = field(default=None, init=False)

    def wait(self) -> None:
        """As Pending.wait. With a timeout torch waits on the host too; without one it would for ever, on the GPU."""
        assert self.work is not None, "a message was waited for before the launch that it goes with"
        with self.lost:
            self.work.wait(self.timeout)


class NcclWire:
    """A Wire; `ranks` are the members' numbers in the group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Mapping[int, int],
        device: torch.device,
        *,
        timeout_seconds: float,
        name: Callable[[int], str],
    ) -> None:
        self.device = device
        self._group = group
        self._ranks = ranks
        self._timeout = timedelta(seconds=timeout_seconds)
        self._name = name
        self._asked: list[tuple[Callable[[list[torch.Tensor], int, int], dist.Work], int, Ticket]] = []

    @classmethod
    def connect(
        cls,
        meeting: Meeting,
        member: int,
        members: Sequence[int],
        *,
        timeout_seconds: float,
        name: Callable[[int], str],
    ) -> NcclWire:
        """Collective over `members`, each of which has a GPU of its own.

        Raises: PeerLostError when not all come.
        """
        timeout = timedelta(seconds=timeout_seconds)
        device = torch.device("cuda", torch.cuda.current_device())
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        rank = members.index(member)
        try:
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
            prefixed = dist.PrefixStore(f"weights/{meeting.generation}/nccl", store)
            backend = dist.ProcessGroupNCCL(prefixed, rank, len(members), options)
            group = dist.ProcessGroup(prefixed, rank, len(members))
            group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
            # The first thing that a group does makes its communicator, and takes all members.
            group.allreduce([torch.zeros(1, device=device)]).wait(timeout)
        except RuntimeError as error:
            raise PeerLostError(f"the {len(members)} GPUs of a sync did not meet by NCCL: {error}") from None
        ranks = {each: number for number, each in enumerate(members)}
        return cls(group, ranks, device, timeout_seconds=timeout_seconds, name=name)

    def send(self, memory: torch.Tensor, peer: int, topic: Topic) -> Ticket:
        return self._ask(self._group.send, memory, peer, topic)

    def receive(self, memory: torch.Tensor, peer: int, topic: Topic) -> Ticket:
        return self._ask(self._group.recv, memory, peer, topic)

    def launch(self) -> None:
        """Raises: PeerLostError."""
        asked, self._asked = self._asked, []
        if not asked:
            return
        with Lost(", ".join(dict.fromkeys(self._name(peer) for _, peer, _ in asked))):
            self._group._start_coalescing(self.device)
            for operation, peer, ticket in asked:
                operation([ticket.memory], self._ranks[peer], 0)
            work = self._group._end_coalescing(self.device)
        for _, _, ticket in asked:
            ticket.work = work

    def _ask(
        self,
        operation: Callable[[list[torch.Tensor], int, int], dist.Work],
        memory: torch.Tensor,
        peer: int,
        topic: Topic,
    ) -> Ticket:
        """`topic` says nothing here: the order does."""
        ticket = Ticket(memory, self._timeout, Lost(self._name(peer)))
        self._asked.append((operation, peer, ticket))
        return ticket
