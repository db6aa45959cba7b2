"""Weight sync in memory: every trainer rank packs its messages, every engine rank unpacks its messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.messages import Message, received_by, sent_by
from mcore_rl.weights.slices.routes import RouteMap
from mcore_rl.weights.slices.senders import RankLocations
from mcore_rl.weights.slices.shard_map import ShardMap
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement
from model_converters.mapping.plan import load_plan
from model_converters.mapping.table import BoundRow, is_parameter
from tests.unit.weights.engine_boxes import box

Tensors = dict[str, torch.Tensor]
Taken = dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]
"""Boxes that an engine rank received, by HF name: the index of the first element, and the values."""


@dataclass(frozen=True)
class Sync:
    """Arguments of one sync that are equal in all processes."""

    rows: list[BoundRow]
    layout: TrainLayout
    shard_map: ShardMap
    locations: RankLocations
    bucket_bytes: int

    def sent_by(self, rank: int) -> list[Message]:
        return sent_by(rank, self.route_map, self.bucket_bytes)

    def received_by(self, rank: int) -> list[Message]:
        return received_by([rank], self.route_map, self.bucket_bytes)

    @cached_property
    def route_map(self) -> RouteMap:
        return RouteMap(Placement(self.rows, self.layout), self.shard_map, self.locations)

    @property
    def num_engine_ranks(self) -> int:
        return len(self.locations.engine_hosts)


def trainer_tensors(rows: list[BoundRow], layout: TrainLayout, rank: int, checkpoint: Tensors) -> Tensors:
    """Return a trainer rank's tensors of an HF checkpoint, by canonical name."""
    tensors = {}
    for load in load_plan(rows, replace(layout, shard_parameters=False), rank):
        tensor = torch.zeros(load.shape)
        for name, piece in load.sources:
            source = checkpoint[name]
            if load.shape:
                part = source.narrow(piece.dim, piece.start, piece.length)
                tensor.narrow(piece.dim, piece.local_start, piece.length).copy_(part)
            else:
                tensor.copy_(source)
        tensors[load.mcore_name] = shard_of(tensor, load.bound, layout, rank)
    return tensors


def shard_of(tensor: torch.Tensor, bound: BoundRow, layout: TrainLayout, rank: int) -> torch.Tensor:
    """Return the rows that a rank stores with layout.shard_parameters, by torch.chunk."""
    if not layout.shard_parameters or not is_parameter(bound):
        return tensor
    if layout.hf_tensors and bound.expert is not None:
        # The experts of a layer are one parameter.
        numbers = torch.arange(bound.row.num_experts).chunk(layout.world_size)
        return tensor if rank < len(numbers) and bound.expert in numbers[rank] else tensor[:0]
    at = layout.coordinates(rank)
    index, num_parts = at.cp + layout.cp * at.dp, layout.cp * layout.dp
    if bound.expert is not None:
        index, num_parts = at.edp, layout.edp
    parts = tensor.chunk(num_parts)
    return parts[index] if index < len(parts) else tensor[:0]


def pack(message: Message, tensors: Tensors) -> torch.Tensor:
    """Pack a message. Bytes of the alignment are 255."""
    memory = torch.full((message.num_bytes,), 255, dtype=torch.uint8)
    for each in message.slices:
        source = tensors[each.mcore_name]
        if each.hf_shape:
            source = source.narrow(each.dim, each.local_start, each.length)
        place = memory[each.offset : each.offset + each.num_bytes].view(each.dtype).view(each.shape)
        place.copy_(source)
    return memory


def delivered(sync: Sync, checkpoint: Tensors) -> list[Taken]:
    """Deliver all messages. Returns the boxes that each engine rank received."""
    in_flight: dict[tuple[int, int, int], tuple[Message, torch.Tensor]] = {}
    for rank in range(sync.layout.world_size):
        tensors = trainer_tensors(sync.rows, sync.layout, rank, checkpoint)
        for message in sync.sent_by(rank):
            in_flight[message.bucket, message.sender, message.receiver] = message, pack(message, tensors)
    ranks = []
    for rank in range(sync.num_engine_ranks):
        taken: Taken = {}
        for message in sync.received_by(rank):
            sent, memory = in_flight.pop((message.bucket, message.sender, message.receiver))
            assert sent == message
            for each in message.slices:
                part = memory[each.offset : each.offset + each.num_bytes].view(each.dtype).view(each.shape)
                taken.setdefault(each.hf_name, []).append((each.first, part))
        ranks.append(taken)
    assert in_flight == {}, "sent but never received"
    return ranks


def check_taken(taken: list[Taken], checkpoint: Tensors, config: dict[str, Any], layout: EngineLayout) -> None:
    """Check that each engine rank received its part of each tensor exactly once."""
    for rank, boxes in enumerate(taken):
        for name, whole in checkpoint.items():
            part = box(name, tuple(whole.shape), config, layout, rank % layout.num_ranks)
            if part is None:
                assert name not in boxes
                continue
            values, counts = torch.full(whole.shape, torch.nan), torch.zeros(whole.shape)
            for start, values_of_box in boxes[name]:
                place = tuple(slice(a, a + n) for a, n in zip(start, values_of_box.shape, strict=True))
                values[place] = values_of_box
                counts[place] += 1
            assert torch.equal(values[part], whole[part]), (name, rank)
            assert int(counts[part].min()) == int(counts.max()) == 1, (name, rank)
            assert int(counts.sum()) == values[part].numel(), (name, rank)
