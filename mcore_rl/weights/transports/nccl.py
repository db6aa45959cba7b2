"""Channel between GPUs of different processes, through NCCL. Not run on a GPU yet.

NCCL has no tags: two processes must issue their messages to each other in the same order, which is by round and, within
a round, by staging buffer. All sends and receives of a process in one round are launched as one group. Separate calls
would each occupy a part of the GPU until their peer is ready; enough of them on two GPUs leave no room for the calls
that they wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.transports.link import MessageTag, PeerLostOnError, Rendezvous


@dataclass
class NcclTransfer:
    """A send or receive that is queued for the next launch, or in flight."""

    memory: torch.Tensor
    timeout: timedelta
    on_error: PeerLostOnError
    work: dist.Work | None = field(default=None, init=False)

    def wait(self) -> None:
        """Block until the transfer is complete (see GlooTransfer.wait)."""
        assert self.work is not None, "wait() was called before launch()"
        # With a timeout torch waits on the host. Without one only the GPU would wait, and forever.
        with self.on_error:
            self.work.wait(self.timeout)


class NcclChannel:
    """Channel over NCCL. `ranks`: rank in the NCCL group by member number of the transfer group."""

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
        self._queued: list[tuple[Callable[[], object], NcclTransfer]] = []

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
        timeout = timedelta(seconds=timeout_seconds)
        device = torch.device("cuda", torch.cuda.current_device())
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        rank = members.index(member)
        try:
            store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
            prefixed = dist.PrefixStore(f"weights/{rendezvous.generation}/nccl", store)
            backend = dist.ProcessGroupNCCL(prefixed, rank, len(members), options)
            group = dist.ProcessGroup(prefixed, rank, len(members))
            group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
            # The first operation of a group creates its communicator, and all members must take part in it.
            group.allreduce([torch.zeros(1, device=device)]).wait(timeout)
        except RuntimeError as error:
            raise PeerLostError(f"the {len(members)} GPUs of a sync did not connect through NCCL: {error}") from None
        ranks = {each: number for number, each in enumerate(members)}
        return cls(group, ranks, device, timeout_seconds=timeout_seconds, name=name)

    def send(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> NcclTransfer:
        return self._queue(partial(self._group.send, [memory], self._ranks[peer], 0), memory, peer)

    def receive(self, memory: torch.Tensor, peer: int, tag: MessageTag) -> NcclTransfer:
        return self._queue(partial(self._group.recv, [memory], self._ranks[peer], 0), memory, peer)

    def launch(self) -> None:
        """Start all queued transfers as one NCCL group.

        Raises: PeerLostError.
        """
        queued, self._queued = self._queued, []
        if not queued:
            return
        with PeerLostOnError(", ".join(dict.fromkeys(transfer.on_error.peer for _, transfer in queued))):
            self._group._start_coalescing(self.device)
            for operation, _ in queued:
                operation()
            work = self._group._end_coalescing(self.device)
        for _, transfer in queued:
            transfer.work = work

    def _queue(self, operation: Callable[[], object], memory: torch.Tensor, peer: int) -> NcclTransfer:
        # The tag of a message is unused: NCCL matches messages by their order.
        transfer = NcclTransfer(memory, self._timeout, PeerLostOnError(self._name(peer)))
        self._queued.append((operation, transfer))
        return transfer
