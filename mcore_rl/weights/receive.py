"""An engine rank's side of a weight sync, independent of the engine: what a turn brings, and in which order turns come.

States of a receiver:

    attached --begin--> updating --receive(0) ... receive(last)--> updating --finish--> attached
                           |  anything out of order, or an error while loading
                           v
                        broken       (the engine holds half an update: it must not generate again)

What others have said to a broken receiver is lost: the next update needs a link of its own, and a new receiver.
A slot is written anew soon after its turn: what an engine keeps, it copies while it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.messages import Slice, views
from mcore_rl.weights.sync_plan import Arrivals
from mcore_rl.weights.transports.interface import Inlet
from mcore_rl.weights.transports.link import Kind, Link, Topic
from mcore_rl.weights.verify import DIGEST_BYTES

Put = Callable[[str, tuple[int, ...], torch.Tensor], None]
"""Takes a box of an HF tensor: its name, the indices of the box's first element, and the box."""


class SliceReceiver:
    """Hands out the slices of one update after the other. `window`: the number of the rank's window."""

    def __init__(self, inlet: Inlet, arrivals: Arrivals, num_turns: int, link: Link, window: int) -> None:
        self.num_turns = num_turns
        self._inlet = inlet
        self._arrivals = arrivals
        self._link = link
        self._window = window
        self._state = "attached"
        self._next = 0
        self._boxes: dict[int, list[tuple[str, tuple[int, ...], torch.Tensor]]] = {}

    @property
    def num_bytes(self) -> int:
        """Of an update, as planned."""
        return self._arrivals.num_bytes

    def begin(self) -> None:
        self._expect("attached", "begin")
        self._state = "updating"
        self._next = 0
        with self._broken_on_error():
            self._inlet.begin()

    def receive(self, turn: int, put: Put) -> int:
        """Passes what the turn brings to `put`; returns its bytes.

        Raises: WeightSyncError when it is not this turn's turn; PeerLostError.
        """
        self._expect("updating", f"bucket {turn}")
        with self._broken_on_error():
            return self._receive(turn, put)

    def _receive(self, turn: int, put: Put) -> int:
        if turn != self._next:
            raise WeightSyncError(f"bucket {turn} came where bucket {self._next} was due")
        arrived = self._inlet.take(turn)
        if turn not in self._boxes:
            placed = [pair for message, memory in arrived for pair in views(message, memory)]
            self._boxes[turn] = [(each.hf_name, first_index(each), place) for each, place in placed]
        for box in self._boxes[turn]:
            put(*box)
        num_bytes = sum(message.num_bytes for message, _ in arrived)
        self._next = turn + 1
        self._inlet.release(turn)
        return num_bytes

    def finish(self) -> None:
        """Ends the update.

        Raises: WeightSyncError when turns are missing.
        """
        self._expect("updating", "finish")
        with self._broken_on_error():
            if self._next != self.num_turns:
                raise WeightSyncError(f"the update ended after {self._next} of {self.num_turns} buckets")
            self._inlet.finish()
        self._state = "attached"

    def digests(self) -> list[tuple[Slice, bytes]]:
        """What trainer ranks say of every slice that they send here.

        Raises: PeerLostError.
        """
        self._expect("attached", "digests")
        with self._broken_on_error():
            return self._digests()

    def _digests(self) -> list[tuple[Slice, bytes]]:
        by_sender: dict[int, list[Slice]] = {}
        for turn in sorted(self._arrivals.turns):
            for placed in self._arrivals.at(turn):
                by_sender.setdefault(placed.message.sender, []).extend(placed.message.slices)
        said = []
        for sender, slices in by_sender.items():
            rows = torch.zeros(len(slices), DIGEST_BYTES, dtype=torch.uint8)
            self._link.receive(rows, sender, Topic(Kind.DIGESTS, self._window, 0)).wait()
            said += [(each, row.numpy().tobytes()) for each, row in zip(slices, rows, strict=True)]
        return said

    def _expect(self, state: str, call: str) -> None:
        if self._state != state:
            raise WeightSyncError(f"{call}: the receiver is {self._state}, not {state}")

    @contextmanager
    def _broken_on_error(self) -> Iterator[None]:
        try:
            with self._link.leaving_if_lost():
                yield
        except BaseException:
            self._state = "broken"
            raise


def first_index(each: Slice) -> tuple[int, ...]:
    """Of a slice's first element in its HF tensor."""
    return tuple(each.start if dim == each.dim else 0 for dim in range(len(each.hf_shape)))
