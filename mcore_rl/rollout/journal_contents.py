"""Format of a journal (journal.py), and its contents.

The file consists of 4-byte words. Each write starts with the number of words that follow. Entries have three words and
a payload:

    BEGIN    number of a request, bytes of its id    seed (2 words), id, padded
    STEP     version, count                          numbers, tokens, log-probabilities: one of each per token
    END      number, index of the finish reason
    RELEASE  number, 0                               the response must not be continued
    TEMPERATURE  number, first token                 float32: sampling temperature from that token of the response on
    SET      number, words of the run                run of the set of the next token, see TokenSets

Files of earlier versions have no TEMPERATURE. Their tokens count as sampled at the temperature of the request that
continues them. Responses have SET entries with rollout.keep_sampling_mask, one for each token.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BEGIN, STEP, END, RELEASE, TEMPERATURE, SET = 1, 2, 3, 4, 5, 6
HEAD = 3  # words that begin every entry
WORD = 4  # bytes per word
BLOCK = 2**20  # tokens that are copied at a time
SET_BLOCK = 256  # sets that are copied at a time


@dataclass(frozen=True)
class JournalContents:
    """Complete writes of a journal: its words, and the positions of entries by kind. Shapes: words int32 [W], places
    int64 [E]."""

    words: np.ndarray
    places: dict[int, np.ndarray]

    @classmethod
    def of(cls, path: Path) -> JournalContents:
        """Parse a file. Raises: OSError."""
        words = np.fromfile(path, dtype=np.int32)
        places = {kind: array("q") for kind in (BEGIN, STEP, END, RELEASE, TEMPERATURE, SET)}
        view, at = words.data, 0  # indexing a memoryview is faster than indexing the array
        # A write whose length exceeds the file was interrupted; it is ignored, and so is everything after it.
        while at < len(view) and at + 1 + view[at] <= len(view):
            at, end = at + 1, at + 1 + view[at]
            while at < end:
                kind = view[at]
                places[kind].append(at)
                at += HEAD
                if kind == STEP:
                    at += 3 * view[at - 1]
                # Two words of the seed, then the id, rounded up to whole words.
                elif kind == BEGIN:
                    at += 2 - (-view[at - 1] // WORD)
                elif kind == TEMPERATURE:
                    at += 1
                elif kind == SET:
                    at += view[at - 1]
        return cls(words, {kind: np.frombuffer(of_kind, np.int64) for kind, of_kind in places.items()})

    def numbers(self, kind: int) -> np.ndarray:
        """Return the request number of each entry. Shapes: int32 [E]."""
        return self.words[self.places[kind] + 1]

    def seconds(self, kind: int) -> np.ndarray:
        """Return the third word of each entry. Shapes: int32 [E]."""
        return self.words[self.places[kind] + 2]

    def temperatures(self) -> np.ndarray:
        """Return request number, position and bits of each temperature, in the order of writing. Shapes: int32 [E,
        3]."""
        return self.words[self.places[TEMPERATURE][:, None] + np.arange(1, HEAD + 1)]

    def sets(self, numbers: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the SET entries in the order of writing, with the new `numbers` of requests; -1 excludes a request."""
        found = numbers[self.numbers(SET)]
        live = found >= 0
        for at, number in zip(self.places[SET][live].tolist(), found[live].tolist(), strict=True):
            entry = self.words[at : at + HEAD + self.words[at + 2]].copy()
            entry[1] = number
            yield entry

    def begins(self) -> Iterator[np.ndarray]:
        """Yield the BEGIN entries."""
        for at, num_bytes in zip(self.places[BEGIN].tolist(), self.seconds(BEGIN).tolist(), strict=True):
            yield self.words[at : at + HEAD + 2 - (-num_bytes // WORD)]

    def names(self) -> Iterator[tuple[str, int]]:
        """Yield id and seed of each BEGIN entry."""
        for entry in self.begins():
            name, seed = entry[HEAD + 2 :].tobytes()[: entry[2]], entry[HEAD : HEAD + 2].tobytes()
            yield name.decode(), int.from_bytes(seed, "little")

    def tokens(self, numbers: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the tokens in the order of sampling, in one or several blocks: request number, token, bits of its
        log-probability, version. `numbers` maps request numbers to new ones; -1 excludes a request.

        Shapes: numbers int32 [R] -> int32 [4, T].
        """
        steps, counts = self.places[STEP], self.seconds(STEP).astype(np.int64)
        # Blocks bound the memory of the copies below; a journal can have the tokens of many long responses.
        blocks = np.flatnonzero(np.diff(np.cumsum(counts) // BLOCK)) + 1
        # A STEP entry stores three columns of `size` words after its head: numbers, tokens, log-probabilities.
        # `places` are the positions of the first column; the others follow at multiples of `size`.
        for at, sizes in zip(np.split(steps, blocks), np.split(counts, blocks), strict=True):
            before = np.cumsum(sizes) - sizes
            places = np.repeat(at + HEAD - before, sizes) + np.arange(sizes.sum())
            of = numbers[self.words[places]] if len(places) else np.zeros(0, np.int32)
            live = np.flatnonzero(of >= 0)
            places, strides = places[live], np.repeat(sizes, sizes)[live]
            columns = self.words[places + strides], self.words[places + 2 * strides]
            yield np.stack([of[live], *columns, np.repeat(self.words[at + 1], sizes)[live]])


def compacted(contents: JournalContents, numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the writes of a new file. `numbers` maps request numbers to new ones; -1 excludes a request.

    Shapes: numbers int32 [R] -> int32 [words].
    """
    live = numbers[contents.numbers(BEGIN)] >= 0
    begins = [entry.copy() for entry in itertools.compress(contents.begins(), live.tolist())]
    for entry in begins:
        entry[1] = numbers[entry[1]]
    temperatures = contents.temperatures()
    temperatures[:, 0] = numbers[temperatures[:, 0]]
    temperatures = temperatures[temperatures[:, 0] >= 0]
    kinds = np.full((len(temperatures), 1), TEMPERATURE, np.int32)
    yield framed(*begins, np.concatenate([kinds, temperatures], axis=1).ravel())
    for block in contents.tokens(numbers):
        for run in np.split(block, np.flatnonzero(np.diff(block[3])) + 1, axis=1):
            if run.size:
                yield framed(np.array([STEP, run[3, 0], run.shape[1]], np.int32), run[:3].ravel())
    sets = contents.sets(numbers)
    while some := list(itertools.islice(sets, SET_BLOCK)):
        yield framed(*some)
    ended = numbers[contents.numbers(END)]
    ends = np.stack([np.full(len(ended), END, np.int32), ended, contents.seconds(END)], axis=1)
    yield framed(ends[ended >= 0].ravel())


def framed(*entries: np.ndarray) -> np.ndarray:
    """Return one write of several entries."""
    return np.concatenate([np.array([sum(map(len, entries))], np.int32), *entries])
