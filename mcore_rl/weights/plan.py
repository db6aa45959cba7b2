"""The plan of a hand-over: buckets of HF tensors.

Every HF tensor has a fixed place: a bucket, and in it an offset. A tensor larger than a bucket is cut along dim 0 into
entries of whole rows, one bucket each, so that the memory never exceeds what was asked for.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mcore_rl.errors import ConfigError, WeightSyncError

if TYPE_CHECKING:
    from model_converters.mapping.plan import TensorPlan


ALIGNMENT_BYTES = 64
"""Of every tensor: a cache line, and a multiple of every element size."""


@dataclass(frozen=True)
class BucketEntry:
    """Rows `first_row : first_row + num_rows` (of dim 0) of the HF tensor `name`, at `offset` bytes in its slot.

    shape is that of the whole tensor; a scalar counts as one row.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first_row: int
    num_rows: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.num_rows * row_bytes(self.shape, self.dtype)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.shape[1:]) if self.shape else ()

    @property
    def start(self) -> tuple[int, ...]:
        """Indices of the first element in the whole tensor."""
        return (self.first_row, *(0 for _ in self.shape[1:])) if self.shape else ()

    @property
    def last(self) -> bool:
        """The entry completes its tensor (entries of one tensor follow each other)."""
        return self.first_row + self.num_rows == _num_rows(self.shape)


@dataclass(frozen=True)
class BucketSpec:
    """Where every tensor of a hand-over lies; picklable, the same object for all writers and readers.

    segment is the name of the shared memory, empty until SharedBuckets.create has made it.
    """

    segment: str
    slot_bytes: int
    num_slots: int
    buckets: tuple[tuple[BucketEntry, ...], ...]

    @property
    def num_buckets(self) -> int:
        return len(self.buckets)

    def slot(self, index: int) -> int:
        return index % self.num_slots

    def bucket_bytes(self, index: int) -> int:
        """Payload of a bucket, without padding."""
        return sum(entry.nbytes for entry in self.buckets[index])

    @property
    def total_bytes(self) -> int:
        return sum(self.bucket_bytes(index) for index in range(self.num_buckets))


def plan_buckets(tensor_plans: Sequence[TensorPlan], bucket_bytes: int, num_slots: int) -> BucketSpec:
    """Places the tensors in plan order; a pure function, so every process computes the same.

    Raises: ConfigError when one row of a tensor is larger than a bucket; WeightSyncError when a name comes twice.
    """
    _check_plans(tensor_plans)
    capacity = bucket_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    buckets: list[list[BucketEntry]] = [[]]
    used = 0
    for plan in tensor_plans:
        rows, size = _num_rows(plan.shape), row_bytes(plan.shape, plan.dtype)
        if size > capacity:
            raise ConfigError(
                f"weights.bucket_mib: {bucket_bytes / 2**20:g} MiB cannot hold one row of {plan.hf_name} "
                f"({size} bytes); set it to at least {math.ceil(size / 2**20)}"
            )
        first = 0
        while first < rows:
            # A tensor that fits a bucket is never cut: fewer, larger copies.
            if buckets[-1] and (rows - first) * size > capacity - used:
                buckets.append([])
                used = 0
            count = min(rows - first, (capacity - used) // size)
            buckets[-1].append(BucketEntry(plan.hf_name, plan.dtype, tuple(plan.shape), first, count, used))
            used += aligned(count * size)
            first += count
    filled = tuple(tuple(bucket) for bucket in buckets if bucket)
    slot_bytes = max((bucket[-1].offset + aligned(bucket[-1].nbytes) for bucket in filled), default=0)
    return BucketSpec("", _round_up(slot_bytes, mmap.PAGESIZE), min(num_slots, max(len(filled), 1)), filled)


def _check_plans(tensor_plans: Sequence[TensorPlan]) -> None:
    names: set[str] = set()
    for plan in tensor_plans:
        if plan.hf_name in names:
            raise WeightSyncError(f"{plan.hf_name} is planned twice")
        if math.prod(plan.shape) == 0:
            raise WeightSyncError(f"{plan.hf_name} is empty: shape {tuple(plan.shape)}")
        names.add(plan.hf_name)


def row_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of one row of dim 0 (of the whole, for a scalar)."""
    return math.prod(shape[1:]) * dtype.itemsize


def aligned(num_bytes: int) -> int:
    return _round_up(num_bytes, ALIGNMENT_BYTES)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _num_rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1
