"""Sets of token ids that trained tokens were sampled from, on the device: the support of the masked softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mcore_rl.errors import McoreRLError
from mcore_rl.types import RankShare, TrajectoryBuffers
from mcore_rl.types.token_sets import WORD_BITS, TokenSets, max_set_words

BIT_ELEMENTS = 1 << 22
"""Number of bits that are unpacked at a time, as one int32 each: 16 MiB."""


@dataclass(frozen=True)
class KeptTokens:
    """The sets of N tokens. Ids and bit sets are stored apart; offsets stay on the host, so that the selection of a
    chunk's tokens does not wait for the device.

    ids: members of the sets that are stored as ids, token by token; bits: the other sets, as in TokenSets.
    num_ids: size of all sets together.

    Shapes: id_rows int32 [I], token of each id; ids int32 [I]; id_offsets int64 [N + 1], host; bit_rows int64 [D],
    token of each bit set; bits int32 [D, words]; bit_offsets int64 [N + 1], host.
    """

    id_rows: torch.Tensor
    ids: torch.Tensor
    id_offsets: np.ndarray
    bit_rows: torch.Tensor
    bits: torch.Tensor
    bit_offsets: np.ndarray
    num_ids: int

    @classmethod
    def of(cls, sets: TokenSets, to_device: Callable[[np.ndarray], torch.Tensor]) -> KeptTokens:
        """Move the sets to a device. Raises: ValueError for bit sets of different vocabularies."""
        lengths, are_bits = np.diff(sets.offsets), sets.are_bits
        id_lengths = np.where(are_bits, 0, lengths)
        bit_rows = np.flatnonzero(are_bits)
        words = np.repeat(are_bits, lengths)
        widths = set(lengths[bit_rows].tolist())
        if len(widths) > 1:
            raise ValueError(f"bit sets of one vocabulary have {sorted(widths)} words")
        return cls(
            id_rows=to_device(np.repeat(np.arange(len(sets), dtype=np.int32), id_lengths)),
            ids=to_device(sets.words[~words]),
            id_offsets=_offsets(id_lengths),
            bit_rows=to_device(bit_rows),
            # Without the first word, which marks the run as a bit set.
            bits=to_device(sets.words[words].reshape(len(bit_rows), widths.pop() if widths else 1)[:, 1:].copy()),
            bit_offsets=_offsets(are_bits),
            num_ids=int(sets.sizes().sum()),
        )

    def __len__(self) -> int:
        return len(self.id_offsets) - 1

    def dropped(self, rows: slice, first: int, count: int) -> torch.Tensor:
        """Return True for the vocabulary entries outside the sets of the tokens `rows`.

        Shapes: bool [rows, count], for the entries from `first` on.
        """
        num_rows, start = rows.stop - rows.start, rows.start
        # The additional column receives the ids of other shards.
        dropped = torch.ones(num_rows, count + 1, dtype=torch.bool, device=self.ids.device)
        part = slice(int(self.id_offsets[rows.start]), int(self.id_offsets[rows.stop]))
        columns = self.ids[part].to(torch.int64) - first
        columns = torch.where((columns >= 0) & (columns < count), columns, count)
        dropped.view(-1).index_fill_(0, (self.id_rows[part].to(torch.int64) - start) * (count + 1) + columns, False)
        begin, end = int(self.bit_offsets[rows.start]), int(self.bit_offsets[rows.stop])
        step = max(BIT_ELEMENTS // (count + 2 * WORD_BITS), 1)
        for at in range(begin, end, step):
            some = slice(at, min(at + step, end))
            dropped[self.bit_rows[some] - start, :count] = ~self._unpacked(some, first, count)
        return dropped[:, :count]

    def _unpacked(self, some: slice, first: int, count: int) -> torch.Tensor:
        """Return the entries [first, first + count) of bit sets. Shapes: bool [sets, count]."""
        begin, end = first // WORD_BITS, -(-(first + count) // WORD_BITS)
        places = torch.arange(WORD_BITS, dtype=torch.int32, device=self.bits.device)
        unpacked = (self.bits[some, begin:end, None] >> places) & 1
        skipped = first - begin * WORD_BITS
        return unpacked.flatten(1)[:, skipped : skipped + count] > 0


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
    """Return the bytes of the largest set of a token: each id has 4 bytes, and 4 for the number of its token."""
    return 8 * max_set_words(vocab_size)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
