"""Plan of a weight sync. All processes share it; each computes only its own messages.

A sync consists of rounds. In each round every engine receives one bucket. The first rounds have the frozen weights
(frozen.py): an update of engines that hold them already starts at `first_trained_round`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch

from mcore_rl.config.quantization import GROUPS, UNQUANTIZED
from mcore_rl.weights.frozen import ALL_TRAINED, TrainedWeights, frozen_rows
from mcore_rl.weights.slices.divided_blocks import BlockGroup, divided_blocks
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.messages import Message, received_by, sent_by
from mcore_rl.weights.slices.routes import RouteMap
from mcore_rl.weights.slices.shard_map import ShardMap
from mcore_rl.weights.transports.topology import Topology
from model_converters.families import family_for
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement
from model_converters.mapping.separate import trainer_rows
from model_converters.mapping.table import BoundRow, bind


@dataclass(frozen=True)
class PlacedMessage:
    """A message and its offset in a slot of the staging buffer, in bytes."""

    message: Message
    offset: int


@dataclass
class IncomingMessages:
    """Messages to one staging buffer by round. `slot_bytes` is the size of the largest round."""

    rounds: dict[int, list[PlacedMessage]] = field(default_factory=dict)
    slot_bytes: int = 0

    def at(self, sync_round: int) -> list[PlacedMessage]:
        return self.rounds.get(sync_round, [])

    @property
    def messages(self) -> list[Message]:
        return self.since(0)

    def since(self, first_round: int) -> list[Message]:
        """Return the messages of an update whose first round is `first_round`."""
        rounds = (placed for sync_round, placed in self.rounds.items() if sync_round >= first_round)
        return [each.message for placed in rounds for each in placed]

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages."""
        return sum(message.num_bytes for message in self.messages)


@dataclass(frozen=True)
class SyncPlan:
    """Plan of a weight sync, picklable.

    Each staging buffer has `num_slots` slots of `bucket_bytes`. Slot `sync_round % num_slots` holds the messages of a
    round, so up to `num_slots` rounds are in flight. Messages are addressed to staging buffers: `Message.receiver` is
    the number of a buffer in `topology.buffers`.

    trained: weights that training changes.
    quantization, quantization_group: keys of rollout (quantization.py). power_of_two_scales: round the scales of
    FP8 tensors up to powers of two, for engines that would otherwise quantise the weights again.
    """

    hf_config: Mapping[str, object]
    dtype: torch.dtype
    train_layout: TrainLayout
    engine_layout: EngineLayout
    topology: Topology
    bucket_bytes: int
    num_slots: int
    quantization: str = UNQUANTIZED
    power_of_two_scales: bool = False
    quantization_group: int = GROUPS[-1]
    trained: TrainedWeights = ALL_TRAINED

    @cached_property
    def rows(self) -> list[BoundRow]:
        rows = trainer_rows(family_for(self.hf_config).rows(self.hf_config), self.train_layout)
        return bind(rows, self.hf_config, self.dtype)

    @property
    def num_rounds(self) -> int:
        """Number of rounds, which is the number of buckets."""
        return self._rounds[1]

    @property
    def first_trained_round(self) -> int:
        """Number of rounds with frozen weights, which come first."""
        return self._rounds[0]

    @cached_property
    def _rounds(self) -> tuple[int, int]:
        num_frozen = num_rounds = 0
        for bucket, piece in self.shard_map.pieces(self.bucket_bytes):
            num_rounds = bucket + 1
            if self.shard_map.is_frozen(piece.bound):
                num_frozen = num_rounds
        return num_frozen, num_rounds

    @cached_property
    def frozen_names(self) -> frozenset[str]:
        """Names of the HF tensors that only updates from round 0 on contain."""
        return frozenset(box.hf_name for box in self.shard_map.tensors(frozen=True))

    @property
    def frozen_parameters(self) -> set[str]:
        """Canonical mcore names of the tensors with frozen weights."""
        return {bound.mcore for bound in self.shard_map.rows if self.shard_map.is_frozen(bound)}

    @cached_property
    def num_tensors(self) -> int:
        """Number of HF tensors that engines load."""
        return len({box.hf_name for box in self.shard_map.tensors()})

    # Seconds for a model of 671B: computed once in each process, not sent with the plan.
    @cached_property
    def shard_map(self) -> ShardMap:
        frozen = frozen_rows(self.hf_config, self.train_layout, self.trained)
        return ShardMap(self.rows, self.engine_layout, self.quantization, self.quantization_group, frozen)

    @cached_property
    def _route_map(self) -> RouteMap:
        # The locations are of staging buffers instead of engine ranks: engines that share a buffer receive once.
        return RouteMap(Placement(self.rows, self.train_layout), self.shard_map, self.topology.locations)

    def __getstate__(self) -> dict[str, object]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def incoming(self, buffers: Collection[int]) -> dict[int, IncomingMessages]:
        """Return all messages to these staging buffers.

        Raises: LayoutError.
        """
        found = {buffer: IncomingMessages() for buffer in buffers}
        for message in received_by(buffers, self._route_map, self.bucket_bytes):
            incoming = found[message.receiver]
            placed = incoming.rounds.setdefault(self._round_of(message), [])
            # The messages of a round follow each other in the slot, in the order of `received_by`.
            offset = placed[-1].offset + placed[-1].message.num_bytes if placed else 0
            placed.append(PlacedMessage(message, offset))
            incoming.slot_bytes = max(incoming.slot_bytes, offset + message.num_bytes)
        return found

    def outgoing(self, rank: int) -> dict[int, list[Message]]:
        """Return all messages from a trainer rank, by round.

        Raises: LayoutError.
        """
        rounds: dict[int, list[Message]] = {}
        for message in sent_by(rank, self._route_map, self.bucket_bytes):
            rounds.setdefault(self._round_of(message), []).append(message)
        return rounds

    def divided_blocks(self, rank: int, *, frozen: bool = False) -> list[BlockGroup]:
        """Return the blocks of `frozen` quantised tensors, or of all others, that a trainer rank divides with itself or
        others."""
        return divided_blocks(rank, self._route_map.placement, self.shard_map, frozen=frozen)

    def peers(self, member: int, messages: Iterable[Message]) -> set[int]:
        """Return the members of the transfer group that a member exchanges messages with.

        `messages`: all messages that it sends, and all messages to the staging buffers that it maps or reads.
        """
        pairs: set[tuple[int, int]] = set()
        for number, sender in {(message.receiver, message.sender) for message in messages}:
            buffer = self.topology.buffers[number]
            # Writers exchange messages with the readers, and without an owner every sender does. Otherwise the owner
            # relays.
            source = sender if buffer.owner is None or sender in buffer.writers else buffer.owner
            pairs |= {(source, self.topology.member(reader)) for reader in buffer.readers}
            if source != sender:
                pairs.add((sender, source))
        return {one if other == member else other for one, other in pairs if member in (one, other)}

    def gpu_peers(self, member: int, messages: Iterable[Message]) -> tuple[set[int], set[int]]:
        """Return the members to which a member sends messages between GPUs, and those from which it receives them.

        `messages`: as in `peers`.
        """
        targets, sources = set(), set()
        for number, sender in {(message.receiver, message.sender) for message in messages}:
            buffer = self.topology.buffers[number]
            if sender in buffer.writers or self.topology.sends_delta(number, sender):
                continue
            if number in self.topology.gpu_buffers:
                target = self.topology.target(number)
                targets |= {target} if sender == member else set()
                sources |= {sender} if target == member else set()
        return targets, sources

    @cached_property
    def _staggers(self) -> bool:
        """True if different engines receive different buckets in one round.

        A bucket holds neighbouring layers or experts: with the same bucket for all, the ranks of one pipeline stage, or
        the owner of these experts, would send to every engine while the others wait. If every bucket has slices of all
        ranks, engines receive the same bucket instead: a rank packs it once for all of them (loans.py).
        """
        layout = self.train_layout
        return layout.pp > 1 or (layout.ep > 1 and self.shard_map.largest_layer_bytes() > self.bucket_bytes)

    def _round_of(self, message: Message) -> int:
        if not self._staggers:
            return message.bucket
        size = self.engine_layout.num_ranks
        group, num_groups = message.receiver // size, len(self.topology.buffers) // size
        first, end = 0, self.first_trained_round  # rounds with frozen weights stay before all others
        if message.bucket >= end:
            first, end = end, self.num_rounds
        length = end - first
        return first + (message.bucket - first - group * length // num_groups) % length
