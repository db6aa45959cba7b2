"""Model of NCCL's group calls in one process, without a GPU: it deadlocks by the same rules.

The launches of a process run one after the other, as on a stream: the next one starts when all messages of the previous
one are complete. The messages of one launch are in flight at the same time. A send matches a receive by their order
between the two processes; tags are ignored, and both must be in flight. A send's memory is read when it matches its
receive, not when it is launched.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta

import torch


@dataclass
class Operation:
    kind: str
    peer: int
    memory: torch.Tensor
    done: bool = False


@dataclass
class Launch:
    """Group call of one process. Implements dist.Work."""

    operations: list[Operation]
    ended: threading.Event = field(default_factory=threading.Event)

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta) -> None:
        assert self.ended.is_set(), "the caller polls first"


class Gpus:
    """Streams of all processes."""

    def __init__(self, num_ranks: int) -> None:
        self._streams: list[deque[Launch]] = [deque() for _ in range(num_ranks)]
        self._lock = threading.Lock()
        self.largest = 0
        """Largest number of messages in one launch."""
        self.num_messages = 0
        """Messages that have arrived."""
        self.groups: list[Group] = []

    def reset(self) -> None:
        """Forget all launches, as if the processes had ended their groups."""
        for stream in self._streams:
            stream.clear()

    def group(self, rank: int) -> Group:
        """Create a rank's process group."""
        with self._lock:
            self.groups.append(Group(self, rank))
            return self.groups[-1]

    def push(self, rank: int, launch: Launch) -> None:
        with self._lock:
            self.largest = max(self.largest, len(launch.operations))
            self._streams[rank].append(launch)
            while self._advance():
                pass

    def _advance(self) -> bool:
        moved = False
        for rank, stream in enumerate(self._streams):
            for operation in stream[0].operations if stream else ():
                if operation.kind == "send" and not operation.done:
                    moved |= self._meet(rank, operation)
        for stream in self._streams:
            if stream and all(operation.done for operation in stream[0].operations):
                stream.popleft().ended.set()
                moved = True
        return moved

    def _meet(self, rank: int, send: Operation) -> bool:
        """Match a send with its receive, if each is the first incomplete message of its direction."""
        sends, receives = self._under_way(rank, "send", send.peer), self._under_way(send.peer, "recv", rank)
        if sends[0] is not send or not receives:
            return False
        assert receives[0].memory.shape == send.memory.shape, "a send matched a receive of another shape"
        receives[0].memory.copy_(send.memory)
        receives[0].done = send.done = True
        self.num_messages += 1
        return True

    def _under_way(self, rank: int, kind: str, peer: int) -> list[Operation]:
        operations = self._streams[rank][0].operations if self._streams[rank] else []
        return [each for each in operations if (each.kind, each.peer, each.done) == (kind, peer, False)]


@dataclass
class Group:
    """A rank's dist.ProcessGroup. Operations outside a group call are rejected."""

    gpus: Gpus
    rank: int
    aborts: int = 0
    _open: list[Operation] | None = None

    def abort(self) -> None:
        self.aborts += 1

    def allreduce(self, memory: list[torch.Tensor]) -> Launch:
        launch = Launch([])
        launch.ended.set()
        return launch

    def _start_coalescing(self, device: torch.device) -> None:
        assert self._open is None
        self._open = []

    def _end_coalescing(self, device: torch.device) -> Launch:
        assert self._open is not None
        launch, self._open = Launch(self._open), None
        self.gpus.push(self.rank, launch)
        return launch

    def send(self, memory: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self._open is not None
        self._open.append(Operation("send", peer, memory[0]))

    def recv(self, memory: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self._open is not None
        self._open.append(Operation("recv", peer, memory[0]))
