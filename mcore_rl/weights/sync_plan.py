"""The plan of a weight sync that all its processes share: each computes its own part, and all parts fit together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.messages import Message, received_by, sent_by
from mcore_rl.weights.slices.needs import Needs
from mcore_rl.weights.slices.routes import Places
from mcore_rl.weights.transports.topology import Topology
from model_converters.families import family_for
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement
from model_converters.mapping.table import BoundRow, bind


@dataclass(frozen=True)
class Placed:
    """A message, and where it begins in the slot of its window, in bytes."""

    message: Message
    offset: int


@dataclass
class Arrivals:
    """What arrives in a window, by turn; `slot_bytes` hold the fullest turn."""

    turns: dict[int, list[Placed]] = field(default_factory=dict)
    slot_bytes: int = 0

    def at(self, turn: int) -> list[Placed]:
        return self.turns.get(turn, [])

    @property
    def num_bytes(self) -> int:
        """Of all messages."""
        return sum(each.message.num_bytes for placed in self.turns.values() for each in placed)


@dataclass(frozen=True)
class SyncPlan:
    """Picklable. A window's slots hold `bucket_bytes` each, and `num_slots` of them are under way at a time.

    At one turn different engines get different buckets: a bucket holds neighbouring layers, and with them the ranks of
    one pipeline stage would send to all engines while the others wait.
    """

    hf_config: dict[str, Any]
    dtype: torch.dtype
    train_layout: TrainLayout
    engine_layout: EngineLayout
    topology: Topology
    bucket_bytes: int
    num_slots: int

    @property
    def rows(self) -> list[BoundRow]:
        return bind(family_for(self.hf_config).rows(self.hf_config), self.hf_config, self.dtype)

    @cached_property
    def num_turns(self) -> int:
        """As many as buckets."""
        return 1 + max((bucket for bucket, _ in Needs(self.rows, self.engine_layout).chunks(self.bucket_bytes)))

    @cached_property
    def num_tensors(self) -> int:
        """HF tensors of which engines take anything."""
        return len({name for bound in Needs(self.rows, self.engine_layout).rows for name in bound.hf})

    def arrivals(self, windows: Collection[int]) -> dict[int, Arrivals]:
        """Everything that comes into these windows.

        Raises: LayoutError.
        """
        found = {window: Arrivals() for window in windows}
        for message in received_by(windows, *self._arguments()):
            arrivals = found[message.receiver]
            placed = arrivals.turns.setdefault(self._turn(message), [])
            offset = placed[-1].offset + placed[-1].message.num_bytes if placed else 0
            placed.append(Placed(message, offset))
            arrivals.slot_bytes = max(arrivals.slot_bytes, offset + message.num_bytes)
        return found

    def departures(self, rank: int) -> dict[int, list[Message]]:
        """Everything that a trainer rank sends, by turn.

        Raises: LayoutError.
        """
        turns: dict[int, list[Message]] = {}
        for message in sent_by(rank, *self._arguments()):
            turns.setdefault(self._turn(message), []).append(message)
        return turns

    def peers_of_reader(self, window: int, arrivals: Arrivals) -> set[int]:
        """Trainer ranks to which a reader of the window speaks."""
        writers, home = self.topology.windows[window].writers, self.topology.windows[window].home
        senders = {placed.message.sender for placed in chain.from_iterable(arrivals.turns.values())}
        return {rank if home is None or rank in writers else home for rank in senders}

    def peers_of_trainer(
        self, rank: int, departures: Mapping[int, Sequence[Message]], arrivals: Mapping[int, Arrivals]
    ) -> set[int]:
        """Members of the transfer group to which a trainer rank speaks; `arrivals`: of the windows that it maps."""
        peers = set()
        for number in {message.receiver for message in chain.from_iterable(departures.values())}:
            window = self.topology.windows[number]
            if window.home is None or rank in window.writers:
                peers |= {self.topology.member(reader) for reader in window.readers}
            else:
                peers.add(window.home)
        for number, of_window in arrivals.items():
            window = self.topology.windows[number]
            if window.home == rank:
                senders = {placed.message.sender for placed in chain.from_iterable(of_window.turns.values())}
                relayed = senders - set(window.writers)
                peers |= relayed
                peers |= {self.topology.member(reader) for reader in window.readers if relayed}
        return peers

    def _arguments(self) -> tuple[Placement, Needs, Places, int]:
        rows = self.rows
        needs = Needs(rows, self.engine_layout)
        return Placement(rows, self.train_layout), needs, self.topology.places, self.bucket_bytes

    def _turn(self, message: Message) -> int:
        size = self.engine_layout.num_ranks
        group, num_groups = message.receiver // size, len(self.topology.windows) // size
        return (message.bucket - group * self.num_turns // num_groups) % self.num_turns
