"""Every rank gets its own rows of what others made, once, and its shares point at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pytest

from mcore_rl.errors import McoreRLError
from mcore_rl.runtime.roles.delivery import Chunk, Delivery, Forgotten, Kept, Wanted, rows_by_rank
from mcore_rl.types import Batch, BuffersRef
from tests.unit.data.test_trajectories import buffers

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
    for dp, shares in enumerate(of.shares(NUM_RANKS, places)):
        for share in shares.by_update():
            found = [delivered[dp][place] for place in share.rows]
            assert found == [(of.chunk_ids[s], of.rows[s]) for s in share.samples]
            assert [tuple(origin) for origin in share.origins] == found
    trained = np.concatenate(of.updates[:2])
    assert sorted(chain(*delivered)) == sorted((of.chunk_ids[s], of.rows[s]) for s in trained)  # each once


@dataclass
class Reader:
    """A process in this one; notes what it was told to fetch."""

    calls: list[Wanted] = field(default_factory=list)

    @property
    def fetch(self) -> Reader:
        return self

    def remote(self, wanted: Wanted) -> str:
        self.calls.append(wanted)
        return f"call {len(self.calls)}"


def arrays(*rows: Sequence[int]) -> list[np.ndarray]:
    return [np.array(wanted, np.int64) for wanted in rows]


def test_a_reader_is_told_its_rows_of_every_chunk_in_one_call() -> None:
    readers = [Reader(), Reader(), Reader()]
    chunks = [BuffersRef(Chunk("a", "handle of a", 5)), BuffersRef(Chunk("b", "handle of b", 6))]
    rows = [arrays([0, 3], [1]), arrays([], []), arrays([], [2])]
    assert Delivery(readers, 9.0).deliver(chunks, rows) == [("call 1",), (), ("call 1",)]
    first, third = readers[0].calls[0], readers[2].calls[0]
    assert (first.makers, first.keys) == (["a", "b"], [5, 6])
    assert (first.offsets.tolist(), first.rows.tolist()) == ([0, 2, 3], [0, 3, 1])
    assert (third.makers, third.keys, third.rows.tolist()) == (["b"], [6], [2])
    assert (first.timeout_seconds, readers[1].calls) == (9.0, [])


def test_a_reader_hears_of_a_maker_once() -> None:
    reader = Reader()
    delivery = Delivery([reader], 9.0)
    for makers in ("a", "ab", "b"):
        chunks = [BuffersRef(Chunk(maker, f"handle of {maker}", 1)) for maker in makers]
        delivery.deliver(chunks, [arrays(*[[0]] * len(chunks))])
    assert [call.handles for call in reader.calls] == [{"a": "handle of a"}, {"b": "handle of b"}, {}]


def test_makers_keep_what_is_referred_to_and_no_longer() -> None:
    kept, forgotten = Kept("engine 0"), Forgotten()
    first, second = (forgotten.refer("engine 0", None, kept.keep(buffers(10 * i))) for i in range(2))
    assert kept.cut(1, np.array([2])).versions.tolist() == [12]
    assert forgotten.take("engine 0") == []
    del first
    keys = forgotten.take("engine 0")
    assert keys == [0]
    assert (forgotten.take("engine 0"), forgotten.take("engine 1")) == ([], [])
    kept.forget(keys)
    with pytest.raises(McoreRLError, match="engine 0 has no trajectories under 0"):
        kept.cut(0, np.array([0]))
    assert len(kept.cut(1, np.arange(5)).prompt_tokens) == 5
    del second
