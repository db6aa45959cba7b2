"""Writers and receivers through real shared memory: every byte arrives, at its place, in its turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.plan import plan_buckets
from mcore_rl.weights.receive import BucketReceiver, Put
from mcore_rl.weights.transports.shared_memory import SharedBuckets
from mcore_rl.weights.verify import BucketDigests, compare, digest
from mcore_rl.weights.write import BucketWriter
from model_converters.mapping.plan import Piece, TensorPlan


def tensor(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Fixture:
    """Two ranks and three kinds of tensor: divided by rows, by columns, and held by one rank alone; also a scalar."""

    def __init__(self, bucket_bytes: int, num_slots: int, num_layers: int = 3) -> None:
        self.whole: dict[str, torch.Tensor] = {}
        self.parts: list[dict[str, torch.Tensor]] = [{}, {}]
        self.plans: list[TensorPlan] = []
        self._add("embed", "embedding", tensor((20, 6), 1), 0)
        for layer in range(num_layers):
            for part, shape, dim in (("rows", (8, 6), 0), ("columns", (5, 12), 1), ("alone", (7,), None)):
                seed = 10 * layer + len(part)
                self._add(f"{layer}.{part}", f"layer.{layer}", tensor(shape, seed), dim)
        self._add("scalar", "head", tensor((), 3), None)
        self.buckets = SharedBuckets.create(plan_buckets(self.plans, bucket_bytes, num_slots))
        self.buckets.unlink()
        self.spec = self.buckets.spec
        self.writers = [BucketWriter(self.spec, self.buckets, self.plans, rank) for rank in (0, 1)]

    def _add(self, name: str, group: str, value: torch.Tensor, dim: int | None) -> None:
        self.whole[name] = value
        mcore = f"mcore.{name}"
        if dim is None:
            pieces = (Piece(1, mcore, 0, 0, 0, value.shape[0] if value.dim() else 0, 0),)
            self.parts[1][mcore] = value.clone()
        else:
            # Local tensors hold something else first, so that local and global starts differ.
            size = value.shape[dim]
            cut = size // 3
            pad = torch.full_like(value.narrow(dim, 0, 1), 99.0)
            self.parts[0][mcore] = torch.cat([pad, value.narrow(dim, 0, cut)], dim)
            self.parts[1][mcore] = torch.cat([pad, value.narrow(dim, cut, size - cut)], dim)
            pieces = (Piece(0, mcore, 0, dim, 0, cut, 1), Piece(1, mcore, 0, dim, cut, size - cut, 1))
        self.plans.append(TensorPlan(name, tuple(value.shape), value.dtype, group, pieces))

    def write(self, index: int) -> int:
        return sum(writer.write(index, parts) for writer, parts in zip(self.writers, self.parts, strict=True))


RINGS = [(1 << 16, 2), (400, 2), (400, 1), (192, 3), (64, 2)]
"""(bucket bytes, slots): all at once; several tensors a bucket; one slot; tensors cut into rows, down to one each."""


@pytest.fixture(params=RINGS, ids=str)
def case(request: pytest.FixtureRequest) -> Iterator[Fixture]:
    case = Fixture(*request.param)
    yield case
    case.buckets.close()


class Engine:
    """Copies what comes into tensors of its own; NaN where nothing has."""

    def __init__(self, case: Fixture) -> None:
        self.loaded = {name: torch.full_like(value, torch.nan) for name, value in case.whole.items()}

    def put(self, name: str, start: tuple[int, ...], box: torch.Tensor) -> None:
        place = tuple(slice(first, first + length) for first, length in zip(start, box.shape, strict=True))
        assert bool(self.loaded[name][place].isnan().all()), f"{name} twice"
        self.loaded[name][place] = box


def transfer(case: Fixture, receiver: BucketReceiver, put: Put) -> None:
    receiver.begin()
    for index in range(case.spec.num_buckets):
        written = case.write(index)
        assert written == case.spec.bucket_bytes(index) == receiver.receive(index, put)
    receiver.finish()


def ignore(name: str, start: tuple[int, ...], box: torch.Tensor) -> None:
    pass


def test_three_updates_arrive_bit_by_bit(case: Fixture) -> None:
    receiver = BucketReceiver(case.buckets)
    for _ in range(3):
        engine = Engine(case)
        transfer(case, receiver, engine.put)
        for name, value in case.whole.items():
            assert torch.equal(engine.loaded[name], value), name
        for held in (case.whole, *case.parts):
            for value in held.values():
                value.mul_(-0.5)


def test_ranks_know_which_buckets_they_write(case: Fixture) -> None:
    for rank, writer in enumerate(case.writers):
        for index in range(case.spec.num_buckets):
            written = writer.write(index, case.parts[rank])
            assert writer.writes_to(index) == (written > 0)


def test_what_is_handed_out_is_the_shared_memory_itself() -> None:
    case = Fixture(1 << 16, 2)
    seen: set[int] = set()
    transfer(case, BucketReceiver(case.buckets), lambda name, start, box: seen.add(box.untyped_storage().data_ptr()))
    assert seen == {case.buckets.view(0, case.spec.buckets[0][0]).untyped_storage().data_ptr()}


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([1], "bucket 1 came where bucket 0 was due"),
        ([0, 0], "bucket 0 came where bucket 1 was due"),
        ([0, 2], "bucket 2 came where bucket 1 was due"),
    ],
)
def test_buckets_out_of_turn_are_refused_and_break_the_receiver(order: list[int], message: str) -> None:
    case = Fixture(400, 2)
    receiver = BucketReceiver(case.buckets)
    with pytest.raises(WeightSyncError, match="bucket 0: the receiver is attached"):
        receiver.receive(0, ignore)
    receiver.begin()
    for index in order[:-1]:
        receiver.receive(index, ignore)
    with pytest.raises(WeightSyncError, match=message):
        receiver.receive(order[-1], ignore)
    for call in (receiver.begin, receiver.finish):
        with pytest.raises(WeightSyncError, match="broken"):
            call()


def test_an_update_that_ends_early_says_what_is_missing() -> None:
    case = Fixture(400, 2)
    receiver = BucketReceiver(case.buckets)
    receiver.begin()
    receiver.receive(0, ignore)
    with pytest.raises(WeightSyncError, match=f"after 1 of {case.spec.num_buckets} buckets; bucket 1 begins with"):
        receiver.finish()


def test_an_engine_that_fails_to_load_breaks_the_receiver() -> None:
    case = Fixture(1 << 16, 2)
    receiver = BucketReceiver(case.buckets)

    def fail(name: str, start: tuple[int, ...], box: torch.Tensor) -> None:
        raise RuntimeError("no such layer")

    receiver.begin()
    with pytest.raises(RuntimeError, match="no such layer"):
        receiver.receive(0, fail)
    with pytest.raises(WeightSyncError, match="broken"):
        receiver.receive(0, fail)


def test_a_spec_of_another_plan_is_refused() -> None:
    case = Fixture(400, 2)
    with pytest.raises(WeightSyncError, match="scalar"):
        BucketWriter(case.spec, case.buckets, case.plans[:-1], 0)


def test_writing_converts_to_the_planned_dtype() -> None:
    value = tensor((4, 8), 3)
    plan = TensorPlan("t", (4, 8), torch.bfloat16, "head", (Piece(0, "m", 0, 0, 0, 4, 0),))
    buckets = SharedBuckets.create(plan_buckets([plan], 1024, 1))
    buckets.unlink()
    assert BucketWriter(buckets.spec, buckets, [plan], 0).write(0, {"m": value}) == 64
    assert torch.equal(buckets.view(0, buckets.spec.buckets[0][0]), value.bfloat16())


def test_digests_of_buckets_are_those_of_the_whole_tensors(case: Fixture) -> None:
    digests = BucketDigests(case.buckets)
    for index in range(case.spec.num_buckets):
        case.write(index)
        digests.add(index)
    expected = {name: digest(value) for name, value in case.whole.items()}
    assert digests.result() == expected
    assert compare(digests.result(), expected) == len(expected)
