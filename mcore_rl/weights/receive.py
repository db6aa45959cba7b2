"""Engine side of a weight sync, independent of the engine: the slices of each round, in the order of the rounds.

States of a receiver:

    attached --begin--> updating --receive(first) ... receive(last)--> updating --finish--> attached
                           |  a call out of order, or any error
                           v
                        broken       (the engine holds half an update and must not generate)

    any state --close--> closed         (the staging buffer is unmapped, and its owner may free it)

Order of messages in one round of a mapped staging buffer (transports/mapped_buffers.py):

    engine rank                               trainer rank
    FREE(r)        ------------------------>  waits for FREE(r) of every reader, then writes slot r % num_slots
    waits          <------------------------  READY(r)
    loads the slices, then FREE(r + num_slots)

The first round of an update is 0, or the first one with trained weights if the engine holds the frozen weights. `begin`
sends FREE for the first `num_slots` rounds, so the senders run up to `num_slots` rounds ahead of the engine.
`receive(r)` returns only after the engine has copied what it keeps: its slot is overwritten soon after. Over the
network there is no FREE message: a receive is posted for each round, and a send completes only with its receive. Files
(transports/files/) have no messages besides the weights; `fetch` copies them to memory before `begin`.

A broken receiver cannot be reused, because messages of the failed update may still be in flight: the next update needs
a new link and a new receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.quantization import TensorBox
from mcore_rl.weights.slices.messages import views
from mcore_rl.weights.sync_plan import IncomingMessages
from mcore_rl.weights.transports.interface import Channels, MessageReceiver
from mcore_rl.weights.transports.link import MessageKind, MessageTag
from mcore_rl.weights.verify import DIGEST_BYTES

LoadBox = Callable[[str, tuple[int, ...], torch.Tensor], None]
"""Loads a box of an HF tensor. Arguments: the tensor's name, the indices of the box's first element, and the box."""


class SliceReceiver:
    """Receives updates and passes their slices to the engine. `buffer`: number of this rank's staging buffer."""

    def __init__(
        self, messages: MessageReceiver, incoming: IncomingMessages, num_rounds: int, channels: Channels, buffer: int
    ) -> None:
        self.num_rounds = num_rounds
        self._messages = messages
        self._incoming = incoming
        self._channels = channels
        self._buffer = buffer
        self._state = "attached"
        self._next = 0
        self._fetching: int | None = None
        """First round of an update from its fetch to its begin."""
        self._boxes: dict[int, list[tuple[str, tuple[int, ...], torch.Tensor]]] = {}
        """Arguments of `load` by round. The memory of a slot stays the same for all updates."""

    @property
    def num_bytes(self) -> int:
        """Planned bytes of an update from round 0 on."""
        return self._incoming.num_bytes

    def fetch(self, first_round: int = 0) -> None:
        """Begin to fetch the next update into this process, before `begin`, if the transport can. The engine may use
        its weights meanwhile."""
        self._expect("attached", "fetch")
        with self._broken_on_error():
            self._fetch(first_round)
        self._fetching = first_round

    def is_fetched(self) -> bool:
        """Return whether no later call of the update will wait for a sender.

        Raises: PeerLostError; StorageError, WeightSyncError naming a file.
        """
        with self._broken_on_error():
            return self._channels.host.is_fetched()

    def begin(self, first_round: int = 0) -> None:
        """Begin an update whose first round is `first_round`, and fetch it unless `fetch` was called.

        Raises: WeightSyncError if `fetch` was called with another round.
        """
        self._expect("attached", "begin")
        self._state = "updating"
        self._next = first_round
        with self._broken_on_error():
            if self._fetching not in (None, first_round):
                raise WeightSyncError(f"the update from round {self._fetching} on was fetched, not from {first_round}")
            if self._fetching is None:
                self._fetch(first_round)
            self._fetching = None
            self._messages.begin(first_round)

    def receive(self, sync_round: int, load: LoadBox) -> int:
        """Receive one round and call `load` for each of its boxes. Returns the bytes received.

        Raises: WeightSyncError if the round is out of order; PeerLostError.
        """
        self._expect("updating", f"round {sync_round}")
        with self._broken_on_error():
            return self._receive(sync_round, load)

    def _receive(self, sync_round: int, load: LoadBox) -> int:
        if sync_round != self._next:
            raise WeightSyncError(f"round {sync_round} was requested, but round {self._next} is next")
        received = self._messages.receive(sync_round)
        if sync_round not in self._boxes:
            placed = [pair for message, memory in received for pair in views(message, memory)]
            self._boxes[sync_round] = [
                (box.hf_name, box.first, place)
                for each, places in placed
                for box, place in zip(each.boxes, places, strict=True)
            ]
        for box in self._boxes[sync_round]:
            load(*box)
        num_bytes = sum(message.num_bytes for message, _ in received)
        self._next = sync_round + 1
        # Only now: from here on the senders may overwrite the slot.
        self._messages.release(sync_round)
        return num_bytes

    def finish(self) -> None:
        """End the update.

        Raises: WeightSyncError if rounds are missing.
        """
        self._expect("updating", "finish")
        with self._broken_on_error():
            if self._next != self.num_rounds:
                raise WeightSyncError(f"the update ended after {self._next} of {self.num_rounds} rounds")
        self._state = "attached"

    def digests(self) -> list[tuple[TensorBox, bytes]]:
        """Receive the trainer ranks' digests of all boxes that this rank keeps.

        Raises: PeerLostError.
        """
        self._expect("attached", "digests")
        with self._broken_on_error():
            return self._digests()

    def close(self) -> None:
        """End the connections and unmap the staging buffer, whose owner may free it then. Afterwards this object cannot
        be used; further calls do nothing.

        Raises: WeightSyncError if views of the buffer still exist.
        """
        if self._state == "closed":
            return
        self._state = "closed"
        self._channels.close()  # first: a transfer that has not ended would write into the memory
        self._boxes.clear()
        self._messages.close()

    def _fetch(self, first_round: int) -> None:
        messages = self._incoming.since(first_round)
        self._channels.host.fetch(self._buffer, {message.sender for message in messages})

    def _digests(self) -> list[tuple[TensorBox, bytes]]:
        self._fetch(0)
        by_sender: dict[int, list[TensorBox]] = {}
        for sync_round in sorted(self._incoming.rounds):
            for placed in self._incoming.at(sync_round):
                boxes = by_sender.setdefault(placed.message.sender, [])
                boxes += (box for each in placed.message.slices for box in each.boxes)
        digests = []
        for sender, boxes in by_sender.items():
            rows = torch.zeros(len(boxes), DIGEST_BYTES, dtype=torch.uint8)
            self._channels.host.receive(rows, sender, MessageTag(MessageKind.DIGESTS, self._buffer, 0)).wait()
            digests += [(each, row.numpy().tobytes()) for each, row in zip(boxes, rows, strict=True)]
        return digests

    def _expect(self, state: str, call: str) -> None:
        if self._state != state:
            raise WeightSyncError(f"{call}: the receiver is {self._state}, not {state}")

    @contextmanager
    def _broken_on_error(self) -> Iterator[None]:
        try:
            with self._channels.closing_on_loss():
                yield
        except BaseException:
            self._state = "broken"
            raise
