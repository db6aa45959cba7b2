"""Division of tokens into groups whose logits are computed for the same columns of the vocabulary.

    sets of a group       columns                                         bits
    small                 ids that at least one of its tokens keeps       over these columns
    large                 entries up to the largest id of all sets        over these entries
    {0, ..., n - 1}       entries up to n - 1                             none: all tokens keep all columns

Small sets cost a copy of the columns' weights instead of the logits of all other entries. Sets that are stored as lists
of ids are joined only while their bits stay below MASK_BYTES per id. Computed on the host, so that no size of a group
waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mcore_rl.types.token_sets import WORD_BITS, TokenSets

BLOCK_TOKENS = 32
"""Number of tokens whose sets are united at a time."""
COLUMN_BYTES = 8
"""Bytes of a column's id on the device."""
MASK_BYTES = 8
"""Largest number of bytes of bits per id of the sets of listed columns, so that the memory of sets grows with their ids
and not with the square of the tokens. A block of tokens has at most 1 + BLOCK_TOKENS / 8 per id."""


@dataclass(frozen=True)
class GroupCosts:
    """Cost model of a group of n tokens with c columns, in multiply-adds per element of a hidden state:
    c (n + copy) + group.

    copy: copy of a weight's element and addition of its gradient. group: kernel launches.
    """

    copy: int
    group: int

    def of(self, tokens: int, columns: int) -> int:
        return columns * (tokens + self.copy) + self.group


COSTS = {"cpu": GroupCosts(100, 6_000), "cuda": GroupCosts(300, 6_000_000)}
"""Costs by device. CPU: measured with hidden size 1,024; a copy includes that products of 32 tokens take 1.5 times as
long per multiply-add. GPU: not measured, estimated for hidden size 4,096 from an H100's bandwidth and bfloat16 speed,
and from 15 launches of 5 us."""


@dataclass(frozen=True)
class HostGroup:
    """Tokens of a group, with its columns (see the module docstring).

    ids: None if the columns are the entries [0, num_columns).
    bits: bit c % 8 of byte c // 8 is column c: the token keeps it. None: all tokens keep all columns.

    Shapes: tokens int64 [n]; ids int64 [num_columns], ascending; bits uint8 [n, ceil(num_columns / 8)].
    """

    tokens: np.ndarray
    num_columns: int
    ids: np.ndarray | None
    bits: np.ndarray | None


def group_sets(sets: TokenSets, costs: GroupCosts) -> list[HostGroup]:
    """Divide all tokens into groups. Raises: ValueError for bit sets of different vocabularies."""
    bit_sets = _BitSets.of(sets)
    lists = np.flatnonzero(~sets.are_bits)
    extent = int(max(bit_sets.ends.max(initial=0), 1 + sets.take(lists).words.max(initial=-1)))
    groups, large = [], []
    for tokens, ids in _unions(sets, lists, extent, costs):
        own = sets.take(tokens)
        # Tokens with large sets are one group, which exists anyway.
        cheap = costs.of(len(tokens), len(ids)) < len(tokens) * extent
        if cheap or not _fits(len(tokens), extent, len(own.words)):
            places = np.zeros(extent, np.int64)
            places[ids] = np.arange(len(ids))
            groups.append(HostGroup(tokens, len(ids), ids, _bits(own, places, len(ids))))
        else:
            large.append(tokens)
    listed = np.concatenate([np.empty(0, np.int64), *large])
    masked = bit_sets.sizes < bit_sets.ends
    if len(listed) or masked.any():
        bits = _bits(sets.take(listed), np.arange(extent), extent)
        if masked.any():
            bits = np.concatenate([bits, bit_sets.bits[masked, : bits.shape[1]]])
        groups.append(HostGroup(np.concatenate([listed, bit_sets.tokens[masked]]), extent, None, bits))
    for end in np.unique(bit_sets.ends[~masked]).tolist():
        groups.append(HostGroup(bit_sets.tokens[~masked & (bit_sets.ends == end)], end, None, None))
    return groups


def _unions(
    sets: TokenSets, tokens: np.ndarray, extent: int, costs: GroupCosts
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Divide tokens whose sets are lists of ids into groups of similar sizes, each with the union of its sets. Blocks
    of tokens are joined as long as this lowers the cost and the bits are within MASK_BYTES."""
    lengths = np.diff(sets.offsets)
    tokens = tokens[np.argsort(lengths[tokens], kind="stable")]
    group, union = tokens[:0], np.zeros(extent, bool)
    for first in range(0, len(tokens), BLOCK_TOKENS):
        block, own = tokens[first : first + BLOCK_TOKENS], np.zeros(extent, bool)
        own[sets.take(block).words] = True
        both, joined = np.concatenate([group, block]), union | own
        num_columns = int(joined.sum())
        apart = costs.of(len(group), int(union.sum())) + costs.of(len(block), int(own.sum()))
        cheaper = costs.of(len(both), num_columns) <= apart
        if not len(group) or (cheaper and _fits(len(both), num_columns, int(lengths[both].sum()))):
            group, union = both, joined
        else:
            yield group, np.flatnonzero(union)
            group, union = block, own
    if len(group):
        yield group, np.flatnonzero(union)


def _fits(num_tokens: int, num_columns: int, num_ids: int) -> bool:
    """Return True if the bits of tokens with `num_ids` ids together are within MASK_BYTES."""
    return num_tokens * -(-num_columns // 8) <= MASK_BYTES * num_ids


def _bits(sets: TokenSets, places: np.ndarray, num_columns: int) -> np.ndarray:
    """Return HostGroup.bits of lists of ids. Shapes: places [extent], column of each id."""
    rows = []
    for first in range(0, len(sets), BLOCK_TOKENS):  # bounds the memory of one byte per column
        block = sets.take(np.arange(first, min(first + BLOCK_TOKENS, len(sets))))
        members = np.zeros((len(block), num_columns), bool)
        members[np.repeat(np.arange(len(block)), np.diff(block.offsets)), places[block.words]] = True
        rows.append(np.packbits(members, axis=1, bitorder="little"))
    return np.concatenate([np.empty((0, -(-num_columns // 8)), np.uint8), *rows])


@dataclass(frozen=True)
class _BitSets:
    """The tokens whose sets are stored as bit sets. ends: 1 + largest id of the set.

    Shapes: tokens, sizes, ends int64 [D]; bits uint8 [D, bytes].
    """

    tokens: np.ndarray
    sizes: np.ndarray
    ends: np.ndarray
    bits: np.ndarray

    @classmethod
    def of(cls, sets: TokenSets) -> _BitSets:
        tokens = np.flatnonzero(sets.are_bits)
        runs = sets.take(tokens)
        widths = np.unique(np.diff(runs.offsets))
        if len(widths) > 1:
            raise ValueError(f"bit sets of one vocabulary have {widths.tolist()} words")
        # Without the first word, which marks the run as a bit set.
        words = runs.words.reshape(len(tokens), *widths)[:, 1:].copy().view(np.uint32) if len(tokens) else _NO_WORDS
        # frexp returns the number of bits of an integer, which float64 represents exactly.
        lengths = np.frexp(words.astype(np.float64))[1].astype(np.int64)
        ends = np.where(words > 0, lengths + WORD_BITS * np.arange(words.shape[1]), 0).max(1, initial=0)
        return cls(tokens, np.bitwise_count(words).sum(1, dtype=np.int64), ends, words.view(np.uint8))


_NO_WORDS = np.empty((0, 0), np.uint32)
