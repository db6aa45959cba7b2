"""Every rank gets its own rows of what others made, once, and its shares point at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pytest

from mcore_rl.runtime.roles.delivery import EngineChunk, cut_for_readers, cut_rows, deliver, rows_by_rank
from mcore_rl.types import Batch, BuffersRef

NUM_RANKS, SIZES = 3, (4, 0, 5)


def batch(seed: int, num_updates: int = 2, kept: int = 7) -> Batch:
    """Samples of three calls, drawn at random; one rank may have none, and the last sample is in no update."""
    random = np.random.default_rng(seed)
    places = [(chunk, row) for chunk, size in enumerate(SIZES) for row in range(size)]
    drawn = [places[i] for i in random.permutation(len(places))[:kept]]
    numbers = np.zeros(kept, np.float32)
    once = np.array_split(random.permutation(kept - 1), num_updates)
    return Batch(
        chunks=tuple(BuffersRef(f"chunk {i}") for i in range(len(SIZES))),
        chunk_ids=np.array([chunk for chunk, _ in drawn], np.int32),
        rows=np.array([row for _, row in drawn], np.int32),
        group_ids=np.arange(kept),
        total_tokens=np.full(kept, 5, np.int32),
        trained_tokens=np.full(kept, 3, np.int32),
        rewards=numbers,
        advantages=numbers,
        loss_weights=numbers,
        dp_ranks=random.integers(0, NUM_RANKS, kept).astype(np.int32),
        updates=(*once, *once[::-1]),  # two epochs
    )


@pytest.mark.parametrize("seed", range(20))
def test_shares_find_their_own_trajectories_in_what_is_delivered(seed: int) -> None:
    of = batch(seed)
    rows, places = rows_by_rank(of, NUM_RANKS)
    delivered = [[(c, int(row)) for c, wanted in enumerate(of_rank) for row in wanted] for of_rank in rows]
    for update in range(len(of.updates)):
        for dp, share in enumerate(of.shares(update, NUM_RANKS, places)):
            found = [delivered[dp][place] for place in share.rows]
            assert found == [(of.chunk_ids[s], of.rows[s]) for s in share.samples]
            assert [tuple(origin) for origin in share.origins] == found
    trained = np.concatenate(of.updates[:2])
    assert sorted(chain(*delivered)) == sorted((of.chunk_ids[s], of.rows[s]) for s in trained)  # each once


@dataclass
class Maker:
    """A process in this one; notes how many objects each call was to return."""

    calls: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    cut: Any = None

    def __post_init__(self) -> None:
        self.cut = self

    def options(self, num_returns: int) -> Maker:
        self._num_returns = num_returns
        return self

    def remote(self, rows: Sequence[np.ndarray], reference: str) -> Any:
        self.calls.append((self._num_returns, [wanted.tolist() for wanted in rows]))
        parts = [f"{reference}{wanted.tolist()}" for wanted in rows]
        return parts if self._num_returns > 1 else parts[0]


class Reader:
    class join:
        @staticmethod
        def remote(*parts: str) -> str:
            return "+".join(parts)


def arrays(*rows: Sequence[int]) -> list[np.ndarray]:
    return [np.array(wanted, np.int64) for wanted in rows]


def test_a_chunk_is_cut_in_one_call_for_those_who_want_of_it() -> None:
    makers = [Maker(), Maker()]
    chunks = [EngineChunk("a", makers[0], 4), EngineChunk("b", makers[1], 2)]
    rows = [arrays([0, 3], [1]), arrays([], []), arrays([2], [])]
    assert cut_for_readers(chunks, rows) == [["a[0, 3]", "b[1]"], [], ["a[2]"]]
    assert makers[0].calls == [(2, [[0, 3], [2]])]
    assert makers[1].calls == [(1, [[1]])]


def test_what_one_reader_wants_whole_is_not_cut() -> None:
    maker = Maker()
    chunk = EngineChunk("a", maker, 2)
    assert cut_for_readers([chunk], [arrays([0, 1])]) == [["a"]]
    assert maker.calls == []
    assert cut_for_readers([chunk], [arrays([1, 0])]) == [["a[1, 0]"]]  # another order is not it


def test_parts_are_joined_by_the_reader_but_one_alone() -> None:
    chunks = [EngineChunk("a", Maker(), 4), EngineChunk("b", Maker(), 2)]
    rows = [arrays([0], [0]), arrays([1], []), arrays([], [])]
    assert deliver(chunks, rows, [Reader()] * 3) == [["a[0]+b[0]"], ["a[1]"], []]


def test_as_many_objects_are_returned_as_are_asked_for() -> None:
    from tests.unit.data.test_trajectories import buffers

    assert len(cut_rows(buffers(), arrays([0], [1, 2]))) == 2
    assert cut_rows(buffers(), arrays([1, 2])).prompt_tokens.tolist() == buffers().prompt_tokens[[1, 2]].tolist()
