"""The plan of a hand-over and its shared memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.errors import ConfigError, WeightSyncError
from mcore_rl.weights.plan import ALIGNMENT_BYTES, plan_buckets
from mcore_rl.weights.transports.shared_memory import SharedBuckets, remove_stale
from model_converters.mapping.plan import Piece, TensorPlan


def whole(
    name: str, shape: tuple[int, ...], group: str = "embedding", dtype: torch.dtype = torch.float32
) -> TensorPlan:
    return TensorPlan(name, shape, dtype, group, (Piece(0, name, 0, 0, 0, shape[0] if shape else 0, 0),))


shapes = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(shapes=shapes, bucket_bytes=st.integers(400, 4000), num_slots=st.integers(1, 4), bf16=st.booleans())
def test_every_row_has_exactly_one_place_and_no_two_overlap(
    shapes: list[tuple[int, ...]], bucket_bytes: int, num_slots: int, bf16: bool
) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float32
    plans = [whole(f"t{i}", shape, f"layer.{i // 3}", dtype) for i, shape in enumerate(shapes)]
    spec = plan_buckets(plans, bucket_bytes, num_slots)
    rows: dict[str, list[int]] = {plan.hf_name: [] for plan in plans}
    for bucket in spec.buckets:
        end = 0
        for entry in bucket:
            assert entry.offset >= end
            assert entry.offset % ALIGNMENT_BYTES == 0
            end = entry.offset + entry.nbytes
            rows[entry.name].extend(range(entry.first_row, entry.first_row + entry.num_rows))
        assert end <= spec.slot_bytes
        assert end <= bucket_bytes
    assert {
        name: list(range(plan.shape[0] if plan.shape else 1)) for name, plan in zip(rows, plans, strict=True)
    } == rows
    assert spec.total_bytes == sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_tensor_that_fits_is_never_cut_and_a_larger_one_is_cut_into_whole_rows() -> None:
    spec = plan_buckets([whole("a", (3, 8)), whole("b", (2, 8)), whole("c", (9, 8))], 128, 2)
    cut = [[(e.name, e.first_row, e.num_rows) for e in bucket] for bucket in spec.buckets]
    assert cut == [[("a", 0, 3)], [("b", 0, 2)], [("c", 0, 4)], [("c", 4, 4)], [("c", 8, 1)]]
    assert [entry.start for bucket in spec.buckets for entry in bucket][-2:] == [(4, 0), (8, 0)]


def test_slots_that_are_never_used_take_no_memory() -> None:
    plans = [whole("a", (4, 8)), whole("b", (4, 8))]
    assert plan_buckets(plans, 128, 2).num_slots == 2
    assert plan_buckets(plans, 1 << 20, 2).num_slots == 1


def test_bad_plans_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"weights\.bucket_mib.*big"):
        plan_buckets([whole("big", (2, 1000))], 1024, 2)
    with pytest.raises(WeightSyncError, match="x is planned twice"):
        plan_buckets([whole("x", (2,)), whole("x", (2,))], 1024, 2)


def test_writer_and_reader_see_the_same_memory_and_only_in_its_slot() -> None:
    spec = plan_buckets([whole(f"t{i}", (16,)) for i in range(4)], 64, 2)
    writer = SharedBuckets.create(spec)
    reader = SharedBuckets.attach(writer.spec)
    writer.unlink()
    for index in range(4):
        (entry,) = writer.spec.buckets[index]
        writer.view(index, entry).fill_(index + 1)
        assert reader.view(index, entry).tolist() == [index + 1] * 16
        (other,) = writer.spec.buckets[index ^ 1]
        assert reader.view(index ^ 1, other)[0] != index + 1
    for buckets in (writer, reader):
        buckets.close()
        with pytest.raises(WeightSyncError, match="closed"):
            buckets.view(0, spec.buckets[0][0])


def test_a_view_outlives_the_closing_of_its_buckets() -> None:
    buckets = SharedBuckets.create(plan_buckets([whole("t", (16,))], 64, 1))
    buckets.unlink()
    view = buckets.view(0, buckets.spec.buckets[0][0])
    view.fill_(3.0)
    buckets.close()
    assert view.tolist() == [3.0] * 16


def test_attaching_after_the_name_is_gone_says_so() -> None:
    buckets = SharedBuckets.create(plan_buckets([whole("t", (16,))], 64, 1))
    buckets.unlink()
    with pytest.raises(WeightSyncError, match="gone"):
        SharedBuckets.attach(buckets.spec)


def test_more_than_the_machine_has_names_the_keys_and_leaves_nothing() -> None:
    # Trying it would end in the OOM killer where /dev/shm may grow as large as memory.
    rows = 2 * psutil.virtual_memory().total // 4096
    spec = plan_buckets([whole("t", (rows, 1024))], rows * 4096 + 64, 1)
    with pytest.raises(ConfigError, match=r"weights\.bucket_mib"):
        SharedBuckets.create(spec)
    assert not list(Path("/dev/shm").glob(f"mcore_rl_{os.getpid()}_*"))


def _create_and_wait(pipe: Connection, unlink: bool) -> None:
    buckets = SharedBuckets.create(plan_buckets([whole("t", (16,))], 64, 1))
    if unlink:
        buckets.unlink()
    pipe.send(buckets.spec.segment)
    time.sleep(60)


def _child(unlink: bool) -> tuple[BaseProcess, Path]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_create_and_wait, args=(theirs, unlink))
    child.start()
    return child, Path("/dev/shm") / ours.recv()


def test_sigkill_leaves_nothing_once_the_name_is_unlinked() -> None:
    child, path = _child(unlink=True)
    child.kill()
    child.join()
    assert path.name.startswith("mcore_rl_")
    assert not path.exists()


def test_a_killed_creators_segment_is_removed_and_a_living_ones_is_not() -> None:
    child, path = _child(unlink=False)
    try:
        assert path.exists()
        assert path.name not in remove_stale()
        assert path.exists()
    finally:
        child.kill()
        child.join()
    deadline = time.monotonic() + 10
    while path.exists() and time.monotonic() < deadline:  # another test session may remove it first
        remove_stale()
    assert not path.exists()
