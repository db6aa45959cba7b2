"""Measurements of one rank on its device. The device determines dtype, sizes and backend."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import distributed as dist

GIB = 1 << 30
WARM_UPS = 3
"""Calls before the measurement: NCCL connects at the first one, and clocks rise."""


class WrongResultError(Exception):
    """The device or the network computed or copied a wrong value."""


@dataclass(frozen=True)
class Sizes:
    """Rows of the square matrices, bytes of copies and all-reduces, and repetitions."""

    dtype: torch.dtype
    rows: int
    device_copy_bytes: int
    host_copy_bytes: int
    reduce_bytes: int
    repeats: int


SIZES = {
    # On an 80 GB device: milliseconds per operation, tensors larger than the caches, at most a quarter of the memory.
    "cuda": Sizes(torch.bfloat16, 8192, GIB, GIB // 2, GIB // 4, 30),
    "cpu": Sizes(torch.float32, 384, 1 << 24, 1 << 24, 1 << 20, 7),
}


class Bench:
    """Measurements on the device with this index on the node."""

    def __init__(self, kind: str, index: int) -> None:
        self.device = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
        self.sizes = SIZES[kind]

    def start(self) -> None:
        """Initialize the device and run one operation on it."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if torch.ones(1, device=self.device).item() != 1:
            raise WrongResultError("the device returned another value than 1")

    def matrix_product(self) -> float:
        """Return TFLOP/s of square matrix products. Raises: WrongResultError."""
        rows, generator = self.sizes.rows, torch.Generator(self.device).manual_seed(1)
        shape = (rows, rows)
        # Random bits: zeros would draw less power and produce less heat.
        a, b = (torch.randn(shape, generator=generator, device=self.device).to(self.sizes.dtype) for _ in range(2))
        product = torch.empty_like(a)
        seconds = self._median_seconds(lambda: torch.matmul(a, b, out=product))
        # The timed product has rounding errors. Products of these integers are exact, so any difference is a fault.
        a, b = (sparse_signs(shape, generator).to(self.sizes.dtype) for _ in range(2))
        torch.matmul(a, b, out=product)
        # Freivalds' check: a single wrong entry changes the sum of its row for any signs.
        signs = torch.randint(0, 2, (rows,), generator=generator, device=self.device).double() * 2 - 1
        wrong = (product.double() @ signs).ne(a.double() @ (b.double() @ signs))
        if wrong.any():
            raise WrongResultError(f"{int(wrong.sum())} rows of a product of {rows} rows are wrong")
        return 2 * rows**3 / seconds / 1e12

    def copy(self) -> float:
        """Return GiB/s of copies on the device; every byte is read once and written once."""
        source = self._numbers(self.sizes.device_copy_bytes)
        return self._copy(source, torch.empty_like(source))

    def copy_to_device(self) -> float:
        """Return GiB/s from host memory, pinned on CUDA."""
        target = self._numbers(self.sizes.host_copy_bytes)
        return self._copy(self._host_copy(target), target.zero_())

    def copy_to_host(self) -> float:
        """Return GiB/s to host memory, pinned on CUDA."""
        source = self._numbers(self.sizes.host_copy_bytes)
        return self._copy(source, self._host_copy(source).zero_())

    def all_reduce(self) -> float:
        """Return GiB/s that each rank sends and receives: bytes x 2 (n - 1) / n.

        Collective: all ranks of the default process group.
        Raises: WrongResultError.
        """
        num_ranks, rank = dist.get_world_size(), dist.get_rank()
        ramp = self._numbers(self.sizes.reduce_bytes).remainder_(1024).float()
        values = ramp + rank
        dist.all_reduce(values)
        # Integers below 2**24 for up to some thousands of ranks: float32 sums are exact in any order.
        expected = ramp * num_ranks + num_ranks * (num_ranks - 1) // 2
        self._check_equal(values, expected, "the sum over all ranks")
        values.zero_()  # repeated sums of other values would grow and overflow
        seconds = self._median_seconds(lambda: dist.all_reduce(values))
        self._check_equal(values, torch.zeros_like(values), "the sum of zeros over all ranks")
        return self.sizes.reduce_bytes * 2 * (num_ranks - 1) / num_ranks / seconds / GIB

    def _numbers(self, num_bytes: int) -> torch.Tensor:
        return torch.arange(num_bytes // 4, dtype=torch.int32, device=self.device)

    def _host_copy(self, source: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(source, device="cpu", pin_memory=self.device.type == "cuda").copy_(source)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> float:
        # A blocking copy synchronizes the host after each repetition, and the events would include its delay.
        seconds = self._median_seconds(lambda: target.copy_(source, non_blocking=True))
        self._check_equal(target.to(self.device), source.to(self.device), "the copy")
        return source.nbytes / seconds / GIB

    def _check_equal(self, result: torch.Tensor, expected: torch.Tensor, name: str) -> None:
        num_wrong = int(torch.count_nonzero(result != expected))
        if num_wrong:
            raise WrongResultError(f"{name} differs in {num_wrong} of {result.numel()} values")

    def _median_seconds(self, work: Callable[[], object]) -> float:
        for _ in range(WARM_UPS):
            work()
        if self.device.type == "cuda":
            # Events in the device's stream: the host does not wait between repetitions.
            events = [torch.cuda.Event(enable_timing=True) for _ in range(self.sizes.repeats + 1)]
            for event in events:
                event.record()
                work()
            torch.cuda.synchronize()
            return median(start.elapsed_time(end) for start, end in pairwise(events)) / 1000
        times = []
        for _ in range(self.sizes.repeats + 1):
            times.append(time.perf_counter())
            work()
        return median(end - start for start, end in pairwise(times))


def sparse_signs(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return integers, one in eight of which is 1 or -1, the others 0.

    Sums of thousands of their products stay below 256, so bfloat16 represents every partial sum exactly in any order.
    """
    sampled = torch.randint(0, 16, shape, generator=generator, device=generator.device)
    return sampled.eq(1).int() - sampled.eq(0).int()


def num_slots(requested: int | None) -> tuple[str, int]:
    """Return the kind of this node's devices and the number to test: `requested`, else all GPUs, else one CPU slot."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = "cuda" if num_gpus else "cpu"
    return kind, min(requested or num_gpus, num_gpus) if num_gpus else requested or 1


def describe(kind: str) -> str:
    """Return the name of this process's device and the versions of its libraries."""
    if kind == "cpu":
        return f"{platform.processor() or platform.machine()}, torch {torch.__version__}, gloo"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {nccl}"
