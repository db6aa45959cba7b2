"""Token ids of sequences that begin with the same tokens, which are stored once."""

from __future__ import annotations

import numpy as np


class SharedTokens:
    """Token ids in segments. A branch has the segments of its beginning in common with the sequence it left.

    Example (the second sequence was branched from the first one after 5 tokens):

        [p p p][s s s s][t t][s s]
        [p p p][s s]               [t t t][s]      the first two segments are views of the first sequence's
    """

    def __init__(self) -> None:
        self.segments: list[np.ndarray] = []
        """int32 arrays; none is ever written."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, token_ids: np.ndarray) -> None:
        """Append a segment, int32 [T]. It must not be a view of a longer array, which would stay in memory."""
        if len(token_ids):
            self.segments.append(token_ids.astype(np.int32, copy=False))
            self._length += len(token_ids)

    def first(self, count: int) -> np.ndarray:
        """Return a copy of the first `count` tokens, int32 [count]."""
        return np.concatenate([np.zeros(0, np.int32), *self.branch(count).segments])

    def branch(self, count: int) -> SharedTokens:
        """Return the first `count` tokens, with the same memory."""
        made = SharedTokens()
        for segment in self.segments:
            if (left := count - len(made)) <= 0:
                break
            made.append(segment[:left])
        return made

    def num_common(self, token_ids: np.ndarray) -> int:
        """Return the number of leading tokens that `token_ids` have in common with these."""
        start = 0
        for segment in self.segments:
            other = token_ids[start : start + len(segment)]
            differing = np.flatnonzero(segment[: len(other)] != other)
            if len(differing) or len(other) < len(segment):
                return start + (int(differing[0]) if len(differing) else len(other))
            start += len(segment)
        return start
