"""Sets of token ids that trained tokens were sampled from, on the device: the support of the masked softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.step.set_groups import COLUMN_BYTES, COSTS, MASK_BYTES, HostGroup, group_sets
from mcore_rl.types import RankShare, TrajectoryBuffers
from mcore_rl.types.token_sets import TokenSets, max_set_words

DROPPED = -1e20
"""Logit of an entry outside the set. exp(DROPPED - m) is exactly 0 for every maximum m of real logits. Its products
with the number of entries and with a scaled gradient are finite in float32; with -inf or the smallest number they would
not be, and the sums of a tile without any entry of a set would become NaN when they are rescaled."""
SET_BYTES = COLUMN_BYTES + MASK_BYTES
"""Largest number of bytes per id of a set that is a list: a column of its group for no other token, and bits."""
MASK_PADDING = 14
"""Largest number of unused columns in a row of an unpacked mask, which consists of whole bytes."""


@dataclass(frozen=True)
class SetGroup:
    """A group of tokens (see set_groups.HostGroup) on the device. rows: its tokens in KeptTokens.order.

    host_ids: the same as ids, so that the part of a shard is found without waiting for the device.
    Shapes: ids int64 [num_columns]; bits uint8 [n, ceil(num_columns / 8)].
    """

    rows: slice
    num_columns: int
    host_ids: np.ndarray | None
    ids: torch.Tensor | None
    bits: torch.Tensor | None

    def columns(self, first: int, count: int) -> slice:
        """Return the columns in the shard [first, first + count) of the vocabulary: places in `ids`, or entries of the
        shard, counted from `first`."""
        if self.host_ids is None:
            return slice(0, min(max(self.num_columns - first, 0), count))
        begin, end = np.searchsorted(self.host_ids, (first, first + count)).tolist()
        return slice(begin, end)

    def unpack(self, tokens: slice, begin: int, end: int, buffer: torch.Tensor) -> torch.Tensor:
        """Write the mask of tokens [n], counted from the group's first, and of columns [begin, end) to `buffer`, which
        is flat and has room for n * (end - begin + MASK_PADDING) elements.

        Returns a view of shape [n, end - begin], with gaps between the rows: DROPPED or True (dtype bool) for entries
        outside the sets, 0 or False for the others.
        """
        assert self.bits is not None
        first, last = begin // 8, -(-end // 8)
        indices = self.bits[tokens, first:last].to(torch.int32).flatten()
        mask = buffer[: 8 * len(indices)]
        # One copied element per byte of bits: 8 elements of dtype bool are copied as one of int64.
        table, out = _byte_masks(buffer.dtype, buffer.device), mask
        if buffer.dtype == torch.bool:
            table, out = table.view(torch.int64), mask.view(torch.int64)
        torch.index_select(table, 0, indices, out=out.view(-1, table.shape[1]))
        return mask.view(-1, 8 * (last - first))[:, begin - 8 * first : end - 8 * first]


@dataclass(frozen=True)
class KeptTokens:
    """The sets of N tokens, in groups.

    order: the tokens group by group; places: the place of each token in `order`. num_ids: size of all sets together.
    Shapes: order, places int64 [N].
    """

    order: torch.Tensor
    places: torch.Tensor
    groups: tuple[SetGroup, ...]
    num_ids: int

    @classmethod
    def of(cls, sets: TokenSets, to_device: Callable[[np.ndarray], torch.Tensor]) -> KeptTokens:
        """Move the sets to a device. Raises: ValueError for bit sets of different vocabularies."""
        device = to_device(np.empty(0, np.uint8)).device.type
        found = group_sets(sets, COSTS.get(device, COSTS["cuda"]))
        order = np.concatenate([np.empty(0, np.int64), *(group.tokens for group in found)])
        return cls(
            order=to_device(order),
            places=to_device(np.argsort(order)),
            groups=tuple(_on_device(found, to_device)),
            num_ids=int(sets.sizes().sum()),
        )

    def __len__(self) -> int:
        return len(self.order)


@lru_cache(8)
def _byte_masks(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the mask of 8 columns for every byte of bits. Shapes: [256, 8]."""
    dropped = torch.arange(256)[:, None] >> torch.arange(8) & 1 == 0
    return (dropped if dtype == torch.bool else dropped.to(dtype) * DROPPED).to(device)


def _on_device(found: Sequence[HostGroup], to_device: Callable[[np.ndarray], torch.Tensor]) -> Iterator[SetGroup]:
    """Move groups to the device, with one copy for all columns and one for all bits."""
    ids = to_device(np.concatenate([np.empty(0, np.int64), *(each.ids for each in found if each.ids is not None)]))
    flat = [each.bits.ravel() for each in found if each.bits is not None]
    bits = to_device(np.concatenate([np.empty(0, np.uint8), *flat]))
    row = 0
    for each in found:
        own_ids = own_bits = None
        if each.ids is not None:
            own_ids, ids = ids[: each.num_columns], ids[each.num_columns :]
        if each.bits is not None:
            own_bits, bits = bits[: each.bits.size].view(each.bits.shape), bits[each.bits.size :]
        yield SetGroup(slice(row, row + len(each.tokens)), each.num_columns, each.ids, own_ids, own_bits)
        row += len(each.tokens)


def trained_sets(
    share: RankShare, members: np.ndarray, chunks: Sequence[TrajectoryBuffers], targets: np.ndarray
) -> TokenSets | None:
    """Join the sets of the trained tokens of the responses `members`; None if no response has recorded sets.

    Shapes: targets int64 [M], the trained tokens in the same order.
    Raises: McoreRLError naming a sample without sets beside others, or with a token outside its set.
    """
    parts, samples = [], []
    for index in members.tolist():
        buffers, row = chunks[share.chunk_ids[index]], int(share.rows[index])
        first, end = (int(buffers.response_offsets[row + i]) for i in (0, 1))
        rows = first + np.flatnonzero(buffers.trained[first:end])
        parts.append(None if buffers.kept is None else buffers.kept.take(rows))
        samples += [int(share.samples[index])] * len(rows)
    known = [part for part in parts if part is not None]
    if not known:
        return None
    if len(known) < len(parts):
        lacking = [int(share.samples[i]) for i, part in zip(members, parts, strict=True) if part is None]
        raise McoreRLError(f"samples {lacking[:10]} have no record of the sets that their tokens were sampled from")
    sets = TokenSets.joined(known)
    if len(outside := np.flatnonzero(~sets.contain(targets))):
        raise McoreRLError(
            f"sample {samples[outside[0]]}: the trained token {targets[outside[0]]} is not in the set that it was "
            "sampled from (rollout.keep_sampling_mask=true); its log-probability would be -inf"
        )
    return sets


def max_device_bytes(vocab_size: int) -> int:
    """Return the bytes of the largest set of a token: a list as long as a bit set, whose ids are columns for no other
    token, and a bit for every entry of the vocabulary."""
    return COLUMN_BYTES * max_set_words(vocab_size) + -(-vocab_size // 8)
