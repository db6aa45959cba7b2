"""Arrangement of the sequences of a packed row in chunks of equal length, and their causal convolution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F

from mcore_rl.megatron.model.attention.packed import upload
from mcore_rl.resolved.costs import DELTA_RULE_CHUNK

CHUNK = DELTA_RULE_CHUNK


@dataclass(frozen=True)
class ChunkedRow:
    """Chunks of all sequences, in the order of the recurrence: the first chunks of all sequences, the second chunks of
    those that have one, and so on, the longest sequence first.

    cells: place of each packed token among the tokens of all chunks, int64 [T].
    active: number of sequences with a first, second, ... chunk; it never increases.
    """

    cells: torch.Tensor
    active: tuple[int, ...]

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """Insert zeros at the end of every sequence. Shapes: [T, heads, ...] -> [chunks, heads, CHUNK, ...]."""
        padded = packed.new_zeros(sum(self.active) * CHUNK, *packed.shape[1:])
        return padded.index_copy(0, self.cells, packed).unflatten(0, (-1, CHUNK)).transpose(1, 2)

    def unpad(self, chunks: torch.Tensor) -> torch.Tensor:
        """Remove the padding. Shapes: [chunks, heads, CHUNK, ...] -> [T, heads, ...]."""
        return chunks.transpose(1, 2).flatten(0, 1).index_select(0, self.cells)


# Cached, because every layer needs the same tensors, also in backward passes, which reject inference tensors.
@lru_cache(maxsize=8)
@torch.inference_mode(False)
def chunked_row(lengths: tuple[int, ...], device: torch.device) -> ChunkedRow:
    """Arrange sequences of these lengths (tokens, in the order of the row)."""
    ranking = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rank = torch.empty(len(lengths), dtype=torch.int64)
    rank[ranking] = torch.arange(len(lengths))
    longest = -(-max(lengths) // CHUNK)
    active = tuple(sum(length > step * CHUNK for length in lengths) for step in range(longest))
    before = torch.tensor([0, *accumulate(active)])
    sequence, position = _coordinates(lengths)
    cells = (before[position // CHUNK] + rank[sequence]) * CHUNK + position % CHUNK
    return ChunkedRow(upload(cells, device), active)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def sequence_offsets(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the starts of the sequences and the length of the row, int64 [sequences + 1]. fla caches its own plan by
    this tensor's identity."""
    return upload(torch.tensor([0, *accumulate(lengths)]), device)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _shifted(lengths: tuple[int, ...], gap: int, device: torch.device) -> torch.Tensor:
    """Return the places of the packed tokens in a row with `gap` empty cells before every sequence, int64 [T]."""
    sequence, _ = _coordinates(lengths)
    return upload(torch.arange(len(sequence)) + gap * (sequence + 1), device)


def _coordinates(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence and the position in it of every packed token, int64 [T] each."""
    sizes = torch.tensor(lengths)
    sequence = torch.arange(len(lengths)).repeat_interleave(sizes)
    return sequence, torch.arange(len(sequence)) - (sizes.cumsum(0) - sizes)[sequence]


def causal_convolution(row: torch.Tensor, weight: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Convolve every channel with its own kernel, within each sequence: a token sees itself and the width - 1 tokens
    before it.

    Shapes: row [T, channels], weight [channels, 1, width] -> [T, channels]. Units: lengths in tokens.
    """
    gap = weight.shape[-1] - 1
    places = _shifted(lengths, gap, row.device)
    padded = row.new_zeros(len(row) + gap * len(lengths), row.shape[1]).index_copy(0, places, row)
    convolved = F.conv1d(padded.T[None], weight, groups=row.shape[1])[0]
    # The window that ends with a token begins `gap` cells before it.
    return convolved.T.index_select(0, places - gap)
