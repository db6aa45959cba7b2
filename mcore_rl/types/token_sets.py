"""Sets of token ids in compact form: the tokens that truncated sampling (top-p, top-k, min-p) left.

The set of a token is a run of int32 words: its ids in ascending order or, if that is shorter, BITS and then a bit set
whose word w has bit b for id 32 w + b. A token that was not sampled has an empty run. So a set takes at most 1 + V / 32
words for V entries of the vocabulary, and a set of few ids takes one word for each. Example with V = 64:

    sets        {3, 9}   not sampled   all but 0
    words       3 9                    BITS -2 -1
    offsets     0        2             2           5
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BITS = -1
"""First word of a bit set; ids are never negative."""
WORD_BITS = 32


@dataclass(frozen=True)
class TokenSets:
    """One set per token (see the example above). Shapes: words int32 [W]; offsets int64 [tokens + 1]."""

    words: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, runs: Sequence[np.ndarray]) -> TokenSets:
        """Join the runs of consecutive tokens; an empty run is a token that was not sampled."""
        offsets = np.zeros(len(runs) + 1, np.int64)
        np.cumsum([len(run) for run in runs], out=offsets[1:])
        return cls(np.concatenate([np.empty(0, np.int32), *runs]).astype(np.int32, copy=False), offsets)

    @classmethod
    def empty(cls, num_tokens: int) -> TokenSets:
        """Return the sets of tokens that were not sampled."""
        return cls(np.empty(0, np.int32), np.zeros(num_tokens + 1, np.int64))

    @classmethod
    def joined(cls, parts: Sequence[TokenSets]) -> TokenSets:
        """Concatenate the tokens of all parts."""
        words = np.concatenate([np.empty(0, np.int32), *(part.words for part in parts)])
        firsts = itertools.accumulate((part.offsets[-1] for part in parts), initial=np.int64(0))
        moved = [part.offsets[1:] + first for part, first in zip(parts, firsts, strict=False)]
        return cls(words, np.concatenate([np.zeros(1, np.int64), *moved]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: np.ndarray) -> TokenSets:
        """Copy the sets of the tokens `rows` (int64 [n]), in this order."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # Word k of a run moves from its old start + k to its new start + k.
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return TokenSets(self.words[places], offsets)

    @property
    def are_bits(self) -> np.ndarray:
        """True for a token whose run is a bit set. Shapes: bool [tokens]."""
        found = np.zeros(len(self), bool)
        sampled = np.flatnonzero(np.diff(self.offsets))
        found[sampled] = self.words[self.offsets[sampled]] == BITS
        return found

    def sizes(self) -> np.ndarray:
        """Count the ids of each set. Shapes: int64 [tokens]."""
        counts, bits = np.diff(self.offsets), self.are_bits
        for row in np.flatnonzero(bits).tolist():
            counts[row] = int(np.bitwise_count(self._bit_words(row)).sum())
        return counts

    def contain(self, token_ids: np.ndarray) -> np.ndarray:
        """Return True where a token's set has the token itself. Shapes: token_ids [tokens] -> bool [tokens]."""
        lengths, bits = np.diff(self.offsets), self.are_bits
        # Ids of a run of ids are compared all at once; words of bit sets are excluded.
        equal = (self.words == np.repeat(token_ids, lengths)) & ~np.repeat(bits, lengths)
        found = np.zeros(len(self), bool)
        found[np.repeat(np.arange(len(self)), lengths)[equal]] = True
        for row in np.flatnonzero(bits).tolist():
            words, token = self._bit_words(row), int(token_ids[row])
            found[row] = token < WORD_BITS * len(words) and bool(words[token // WORD_BITS] >> (token % WORD_BITS) & 1)
        return found

    def _bit_words(self, row: int) -> np.ndarray:
        return self.words[self.offsets[row] + 1 : self.offsets[row + 1]].view(np.uint32)


def encode_ids(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the run of a set of ids, which are below vocab_size. Shapes: integer [n], ascending -> int32 [words]."""
    most = -(-vocab_size // WORD_BITS)
    if len(ids) <= most + 1:
        return ids.astype(np.int32)
    members = np.zeros(most * WORD_BITS, bool)
    members[ids] = True
    # Bit b of byte c is id 8 c + b, and bytes of a word follow in ascending order.
    return np.concatenate([np.array([BITS], np.int32), np.packbits(members, bitorder="little").view("<i4")])


def max_set_words(vocab_size: int) -> int:
    """Return the largest number of words of a set."""
    return 1 + -(-vocab_size // WORD_BITS)
