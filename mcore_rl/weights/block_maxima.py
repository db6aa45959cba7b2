"""Largest magnitudes of divided blocks, combined over the trainer ranks that hold parts of them.

Once per sync, before the first round, every member of a group sends its own maxima to the group's first rank, which
returns the maxima of all members. Messages have one float32 per divided block of which the member holds a part:

    member -> first rank    MAXIMA of the member
    first rank -> member    MAXIMA of the group
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mcore_rl.weights.quantization import block_maxima, block_range
from mcore_rl.weights.slices.divided_blocks import BlockGroup, DividedTensor, partial_boxes
from mcore_rl.weights.tensor_parts import part_of
from mcore_rl.weights.transports.interface import Channels, Transfer
from mcore_rl.weights.transports.link import MessageKind, MessageTag


class BlockMaxima:
    """Combines the maxima of the groups of trainer rank `rank`. Trainer ranks are the first members of the link.

    frozen: the groups are of frozen weights, which few updates contain; equal on both ends of a message.
    """

    def __init__(self, groups: Sequence[BlockGroup], rank: int, channels: Channels, *, frozen: bool = False) -> None:
        self._groups, self._rank, self._channels, self._frozen = groups, rank, channels, frozen

    @property
    def peers(self) -> set[int]:
        """Trainer ranks with which this rank exchanges maxima."""
        return {peer for group in self._groups for peer in self._partners(group)}

    def combine(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the maxima of all blocks by HF name, for tensors with divided blocks; 0 for blocks that are not.

        tensors: this rank's parameters by canonical mcore name.
        Shapes: float32 [block rows, block columns].
        Collective: all trainer ranks with a common group.
        Raises: PeerLostError; WeightSyncError.
        """
        tables = [[own_maxima(each, tensors) for each in group.tensors] for group in self._groups]
        vectors = [
            torch.cat([table[torch.from_numpy(each.mask)] for each, table in zip(group.tensors, own, strict=True)])
            for group, own in zip(self._groups, tables, strict=True)
        ]
        self._exchange(vectors)
        for group, own, vector in zip(self._groups, tables, vectors, strict=True):
            parts = vector.split([int(each.mask.sum()) for each in group.tensors])
            for each, table, part in zip(group.tensors, own, parts, strict=True):
                table[torch.from_numpy(each.mask)] = part
        return {
            each.hf_name: table
            for group, own in zip(self._groups, tables, strict=True)
            for each, table in zip(group.tensors, own, strict=True)
        }

    def _exchange(self, vectors: Sequence[torch.Tensor]) -> None:
        """Replace the maxima of the blocks that this rank divides by the maxima over all members of their groups."""
        joined = [(group, vector) for group, vector in zip(self._groups, vectors, strict=True) if self._partners(group)]
        members = [pair for pair in joined if pair[0].ranks[0] != self._rank]
        # First what needs no answer, for all groups: the first rank of one group may be a member of another.
        pending = [self._send(group, group.ranks[0], vector, self._rank) for group, vector in members]
        for group, vector in joined:
            if group.ranks[0] != self._rank:
                continue
            for peer in self._partners(group):
                positions = torch.from_numpy(group.positions[peer])
                vector[positions] = torch.maximum(vector[positions], self._receive(group, peer, peer))
            pending += [self._send(group, peer, vector, peer) for peer in self._partners(group)]
        for group, vector in members:
            positions = torch.from_numpy(group.positions[self._rank])
            vector[positions] = self._receive(group, group.ranks[0], self._rank)
        for transfer in pending:
            transfer.wait()

    def _send(self, group: BlockGroup, peer: int, vector: torch.Tensor, member: int) -> Transfer:
        """Send the maxima of the blocks that `member` divides."""
        return self._channels.host.send(vector[torch.from_numpy(group.positions[member])], peer, self._tag(group, peer))

    def _receive(self, group: BlockGroup, peer: int, member: int) -> torch.Tensor:
        memory = torch.empty(len(group.positions[member]))
        self._channels.host.receive(memory, peer, self._tag(group, peer)).wait()
        return memory

    def _partners(self, group: BlockGroup) -> list[int]:
        """Return the other ranks with which this rank exchanges messages."""
        if group.ranks[0] == self._rank:
            return [peer for peer in group.ranks[1:] if peer in group.positions]
        return [group.ranks[0]] if self._rank in group.positions else []

    def _tag(self, group: BlockGroup, peer: int) -> MessageTag:
        # Both ends count the groups in which they exchange messages in the same order: a rank's groups are sorted.
        common = [each.ranks for each in self._groups if each.ranks[0] in (self._rank, peer) and peer in each.ranks]
        return MessageTag(MessageKind.MAXIMA, common.index(group.ranks), int(self._frozen))


def own_maxima(tensor: DividedTensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitudes of this rank's parts of divided blocks; 0 elsewhere.

    Shapes: float32 [block rows, block columns] in host memory.
    """
    maxima = torch.zeros(tensor.mask.shape)
    for each in tensor.held:
        values, first = part_of(each, tensors, each.shape), each.first
        for rows, columns in partial_boxes(first, each.shape, each.hf_shape):
            begin = (first[0] + rows.start, first[1] + columns.start)
            part = values[rows, columns]
            found = block_maxima(part, begin, each.dtype).cpu()
            blocks = tuple(slice(block.start, block.stop) for block in map(block_range, begin, part.shape))
            maxima[blocks] = torch.maximum(maxima[blocks], found)
    return maxima
