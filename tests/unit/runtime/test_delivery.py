"""Delivery of trajectories from producers to readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
import pytest

from mcore_rl.data.trajectories import join_rows, take_rows
from mcore_rl.errors import McoreRLError, WorkerDiedError
from mcore_rl.runtime import trajectory_store
from mcore_rl.runtime.delivery import (
    Chunk,
    Delivery,
    Part,
    ReleasedKeys,
    Rows,
    TrajectoryPlace,
    rows_by_rank,
)
from mcore_rl.runtime.trajectory_store import FetchRequest, TrajectoryStore, fetch
from mcore_rl.types import Batch, BuffersRef, TrajectoryBuffers
from tests.unit.data.test_trajectories import buffers
from tests.unit.rollouts import batch_of
from tests.unit.runtime.made import TASK, chunk

NUM_RANKS, SIZES = 3, (4, 0, 5)


def batch(seed: int, num_updates: int = 2, kept: int = 7) -> Batch:
    """Random samples of three chunks. A rank may have none; the last sample is in no update."""
    random = np.random.default_rng(seed)
    places = [(chunk, row) for chunk, size in enumerate(SIZES) for row in range(size)]
    drawn = [places[i] for i in random.permutation(len(places))[:kept]]
    once = np.array_split(random.permutation(kept - 1), num_updates)
    return batch_of(
        random.integers(0, NUM_RANKS, kept),
        chunks=tuple(BuffersRef(f"chunk {i}") for i in range(len(SIZES))),
        chunk_ids=np.array([chunk for chunk, _ in drawn], np.int32),
        rows=np.array([row for _, row in drawn], np.int32),
        updates=(*once, *once[::-1]),  # two epochs
    )


@pytest.mark.parametrize("seed", range(20))
def test_rows_by_rank_shares_find_their_trajectories(seed: int) -> None:
    of = batch(seed)
    rows, places = rows_by_rank(of, NUM_RANKS)
    delivered = [
        [(int(c), int(row)) for c, part in zip(wanted.chunks, split(wanted), strict=True) for row in part]
        for wanted in rows
    ]
    for dp, shares in enumerate(of.shares(NUM_RANKS, places)):
        for share in shares.by_update():
            found = [delivered[dp][place] for place in share.rows]
            assert found == [(of.chunk_ids[s], of.rows[s]) for s in share.samples]
            assert [tuple(origin) for origin in share.origins] == found
    trained = np.concatenate(of.updates[:2])
    assert sorted(chain(*delivered)) == sorted((of.chunk_ids[s], of.rows[s]) for s in trained)  # each once


def split(wanted: Rows | FetchRequest) -> list[np.ndarray]:
    return [wanted.rows[start:end] for start, end in pairwise(wanted.offsets)]


def cut(kept: TrajectoryStore, *wanted: tuple[int, Sequence[int]]) -> TrajectoryBuffers:
    rows = rows_of(*[of_key for _, of_key in wanted])
    return kept.cut(np.array([key for key, _ in wanted]), rows.offsets, rows.rows)


@dataclass
class Reader:
    """Reader that records its requests."""

    calls: list[FetchRequest] = field(default_factory=list)

    def call_for_two(self, method: object, wanted: FetchRequest) -> tuple[FetchRequest, str]:
        self.calls.append(wanted)
        return wanted, f"call {len(self.calls)}"


@dataclass
class Come:
    """Fake Watch and its attendant; fetches from `lost` producers fail."""

    lost: frozenset[str] = frozenset()
    renew: Callable[[Sequence[Chunk]], bool] = lambda chunks: False
    dependent_seconds: float = 9.0

    @property
    def attendant(self) -> Come:
        return self

    def blame_the_dead(self) -> None: ...

    def get(self, references: Sequence[FetchRequest], needs: Sequence[object]) -> None:
        assert {*needs} >= {handle for wanted in references for handle in wanted.handles.values()}
        for wanted in references:
            if gone := self.lost & {*wanted.producers}:
                raise WorkerDiedError(f"{gone} died")


def rows_of(*by_chunk: Sequence[int]) -> Rows:
    return Rows.of([np.array(wanted, np.int64) for wanted in by_chunk])


def test_deliver_requests_all_rows_of_a_reader_at_once() -> None:
    readers = [Reader(), Reader(), Reader()]
    chunks = [chunk("a", "handle of a", 5), chunk("b", "handle of b", 6)]
    rows = [rows_of([0, 3], [1]), rows_of([], []), rows_of([], [2])]
    assert Delivery(readers, Come()).deliver(chunks, rows) == [("call 1",), (), ("call 1",)]
    first, third = readers[0].calls[0], readers[2].calls[0]
    assert (first.producers, first.producer_of.tolist(), first.keys.tolist()) == (["a", "b"], [0, 1], [5, 6])
    assert (first.offsets.tolist(), first.rows.tolist()) == ([0, 2, 3], [0, 3, 1])
    assert (third.producers, third.keys.tolist(), third.rows.tolist()) == (["b"], [6], [2])
    assert (first.timeout_seconds, readers[1].calls) == (9.0, [])


def test_deliver_chunk_of_several_producers_keeps_its_order() -> None:
    parts = [
        Part(TrajectoryPlace("a", None, 5), 0, 4, (0, 4)),
        Part(TrajectoryPlace("b", None, 6), 4, 6, (4, 6)),
        Part(TrajectoryPlace("a", None, 7), 6, 9, (6, 9)),
    ]
    whole = BuffersRef(Chunk(parts, TASK))
    reader = Reader()
    Delivery([reader], Come()).deliver([chunk("b", None, 1), whole], [rows_of([2], [3, 8, 5, 4, 6, 0])])  # type: ignore[arg-type]
    (call,) = reader.calls
    wanted = zip(call.producer_of.tolist(), call.keys.tolist(), (rows.tolist() for rows in split(call)), strict=True)
    producers = [(call.producers[producer], key, rows) for producer, key, rows in wanted]
    assert producers == [("b", 1, [2]), ("a", 5, [3]), ("a", 7, [2]), ("b", 6, [1, 0]), ("a", 7, [0]), ("a", 5, [0])]


def test_deliver_passes_a_producer_to_a_reader_once() -> None:
    reader = Reader()
    group = Delivery([reader], Come())
    for producers in ("a", "ab", "b"):
        chunks = [chunk(producer, f"handle of {producer}", 1) for producer in producers]
        group.deliver(chunks, [rows_of(*[[0]] * len(chunks))])
    assert [call.handles for call in reader.calls] == [{"a": "handle of a"}, {"b": "handle of b"}, {}]


def test_deliver_renews_rows_of_a_lost_producer() -> None:
    asked: list[list[str]] = []

    def renew(chunks: Sequence[Chunk]) -> bool:
        asked.append([each.parts[0].place.producer for each in chunks])
        for each in chunks:
            if each.parts[0].place.producer == "b":
                each.parts = [Part(TrajectoryPlace("c", "handle of c", 9), 0, 5, (0, 5))]
        return True

    readers = [Reader(), Reader()]
    chunks = [chunk("a", "handle of a", 5), chunk("b", "handle of b", 6)]
    group = Delivery(readers, Come(frozenset("b"), renew))  # type: ignore[arg-type]
    assert group.deliver(chunks, [rows_of([0], [1]), rows_of([2], [])]) == [("call 2",), ("call 2",)]
    assert asked == [["a", "b"]]
    again = readers[0].calls[1]
    assert (again.producers, again.keys.tolist(), again.handles) == (["a", "c"], [5, 9], {"c": "handle of c"})


def test_deliver_failure_without_a_loss_is_raised() -> None:
    group = Delivery([Reader()], Come(frozenset("a")))  # type: ignore[arg-type]
    with pytest.raises(WorkerDiedError, match="died"):
        group.deliver([chunk("a", "handle of a", 5)], [rows_of([0])])


def test_trajectory_store_keeps_referenced_trajectories_only() -> None:
    kept, forgotten = TrajectoryStore("engine 0"), ReleasedKeys()
    first, second = (forgotten.refer("engine 0", None, kept.keep(buffers(10 * i), [f"request {i}"])) for i in range(2))
    assert cut(kept, (1, [2])).versions.tolist() == [12]
    assert forgotten.take("engine 0") == []
    del first
    keys = forgotten.take("engine 0")
    assert keys == [0]
    assert (forgotten.take("engine 0"), forgotten.take("engine 1")) == ([], [])
    assert kept.release(keys) == ["request 0"]
    with pytest.raises(McoreRLError, match="engine 0 has no trajectories under 0"):
        cut(kept, (1, [1]), (0, [0]))
    assert len(cut(kept, (1, range(5))).prompt_tokens) == 5
    del second


def test_fetch_restores_the_order_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers alternate from chunk to chunk; each is called once."""
    kept = {producer: TrajectoryStore(producer) for producer in "ab"}
    keys = [kept[producer].keep(buffers(10 * number)) for number, producer in enumerate("abab")]
    calls: list[str] = []

    @dataclass
    class Cut:
        producer: str

        def call(self, method: object, *arguments: np.ndarray) -> object:
            calls.append(self.producer)
            return kept[self.producer].cut(*arguments)

    monkeypatch.setattr(trajectory_store.ray, "get", lambda made, timeout: list(made))
    rows = rows_of([3, 0], [1], [2], [0, 4])
    wanted = FetchRequest(["a", "b"], np.array([0, 1, 0, 1]), np.array(keys), rows.offsets, rows.rows, {}, 1.0)
    fetched = fetch(wanted, {producer: Cut(producer) for producer in "ab"})
    assert calls == ["a", "b"]
    expected = join_rows([take_rows(buffers(10 * i), part) for i, part in enumerate(split(rows))])
    for name in ("tokens", "token_offsets", "prompt_tokens", "response_offsets", "logp_rollout", "versions", "trained"):
        assert getattr(fetched, name).tolist() == getattr(expected, name).tolist()


def test_begin_sends_all_requests_and_only_wait_raises_a_loss() -> None:
    readers = [Reader(), Reader()]
    group = Delivery(readers, Come(frozenset("a")))  # type: ignore[arg-type]
    pending = group.begin([chunk("a", "handle of a", 5)], [rows_of([0]), rows_of([1])])
    assert [len(reader.calls) for reader in readers] == [1, 1]
    with pytest.raises(WorkerDiedError, match="died"):
        pending.wait()
