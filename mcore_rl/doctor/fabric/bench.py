"""What one rank measures on its device. The device decides dtype, sizes and backend; all else is the same."""

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


class WrongResultError(Exception):
    """The device or the network computed or copied something else than it should have."""


@dataclass(frozen=True)
class Sizes:
    """Rows of the square matrices, bytes of copies and all-reduces, how often each is timed."""

    dtype: torch.dtype
    rows: int
    device_copy_bytes: int
    host_copy_bytes: int
    reduce_bytes: int
    repeats: int


SIZES = {
    # They fill an 80 GB device for some milliseconds each, beyond its caches; a quarter of its memory at most.
    "cuda": Sizes(torch.bfloat16, 8192, GIB, GIB // 2, GIB // 4, 30),
    "cpu": Sizes(torch.float32, 384, 1 << 24, 1 << 24, 1 << 20, 7),
}


class Bench:
    """The device of one rank, by its index on the node."""

    def __init__(self, kind: str, index: int) -> None:
        self.device = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
        self.sizes = SIZES[kind]
        self.hinder: Callable[[], object] = lambda: None
        """Called before every timed piece of work, inside its time."""

    def start(self) -> None:
        """Takes the device and proves that it answers."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if torch.ones(1, device=self.device).item() != 1:
            raise WrongResultError("a one became something else")

    def matrix_product(self) -> float:
        """TFLOP/s of square matrix products, on values that use all bits: zeros would spare a device power and heat.

        Raises: WrongResultError.
        """
        rows, generator = self.sizes.rows, torch.Generator(self.device).manual_seed(1)
        shape = (rows, rows)
        a, b = (torch.randn(shape, generator=generator, device=self.device).to(self.sizes.dtype) for _ in range(2))
        product = torch.empty_like(a)
        seconds = self._median_seconds(lambda: torch.matmul(a, b, out=product))
        a, b = (sparse_signs(shape, generator).to(self.sizes.dtype) for _ in range(2))
        torch.matmul(a, b, out=product)
        # Freivalds: a single wrong entry changes its row's sum, whatever the signs are.
        signs = torch.randint(0, 2, (rows,), generator=generator, device=self.device).double() * 2 - 1
        wrong = (product.double() @ signs).ne(a.double() @ (b.double() @ signs))
        if wrong.any():
            raise WrongResultError(f"{int(wrong.sum())} rows of a product of {rows} rows are wrong")
        return 2 * rows**3 / seconds / 1e12

    def copy(self) -> float:
        """GiB/s of copies on the device; every byte is read once and written once."""
        source = self._numbers(self.sizes.device_copy_bytes)
        return self._copy(source, torch.empty_like(source))

    def copy_to_device(self) -> float:
        """GiB/s from host memory, pinned on CUDA."""
        target = self._numbers(self.sizes.host_copy_bytes)
        source = self._host_memory(target).copy_(target)
        return self._copy(source, target.zero_())

    def copy_to_host(self) -> float:
        """GiB/s to host memory, pinned on CUDA."""
        source = self._numbers(self.sizes.host_copy_bytes)
        return self._copy(source, self._host_memory(source))

    def all_reduce(self) -> float:
        """GiB/s that each rank sends and receives (bytes x 2 (n - 1) / n) over the default process group.

        Collective: all ranks of the group.
        Raises: WrongResultError.
        """
        num_ranks, rank = dist.get_world_size(), dist.get_rank()
        ramp = self._numbers(self.sizes.reduce_bytes).remainder_(1024).float()
        values = ramp + rank
        dist.all_reduce(values)
        # Integers below 2**24 up to some thousands of ranks, which float32 sums without rounding in any order.
        expected = ramp * num_ranks + num_ranks * (num_ranks - 1) // 2
        self._check_equal(values, expected, "the sum over all ranks")
        values.zero_()
        seconds = self._median_seconds(lambda: dist.all_reduce(values))
        self._check_equal(values, torch.zeros_like(values), "the sum of zeros over all ranks")
        return self.sizes.reduce_bytes * 2 * (num_ranks - 1) / num_ranks / seconds / GIB

    def _numbers(self, num_bytes: int) -> torch.Tensor:
        return torch.arange(num_bytes // 4, dtype=torch.int32, device=self.device)

    def _host_memory(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> float:
        seconds = self._median_seconds(lambda: target.copy_(source, non_blocking=True))
        self._check_equal(target.to(self.device), source.to(self.device), "what was copied")
        return source.nbytes / seconds / GIB

    def _check_equal(self, result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        num_wrong = int(torch.count_nonzero(result != expected))
        if num_wrong:
            raise WrongResultError(f"{what} differs in {num_wrong} of {result.numel()} values")

    def _median_seconds(self, work: Callable[[], object]) -> float:
        for _ in range(WARM_UPS):
            work()
        marks = [self._mark()]
        for _ in range(self.sizes.repeats):
            self.hinder()
            work()
            marks.append(self._mark())
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return median(_seconds_between(a, b) for a, b in pairwise(marks))

    def _mark(self) -> torch.cuda.Event | float:
        """This moment: in the device's queue of work, or on the clock."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def sparse_signs(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Integers, one in eight of which is 1 or -1, the others 0: sums of thousands of their products stay below 256 on
    the way and at the end, so that bfloat16 holds them exactly, in any order."""
    drawn = torch.randint(0, 16, shape, generator=generator, device=generator.device)
    return drawn.eq(1).int() - drawn.eq(0).int()


def _seconds_between(earlier: torch.cuda.Event | float, later: torch.cuda.Event | float) -> float:
    if isinstance(earlier, float) or isinstance(later, float):
        return later - earlier
    return earlier.elapsed_time(later) / 1000


PROBES: dict[str, Callable[[Bench], float | None]] = {
    "start": Bench.start,
    "matrix_product": Bench.matrix_product,
    "copy": Bench.copy,
    "copy_to_device": Bench.copy_to_device,
    "copy_to_host": Bench.copy_to_host,
    "all_reduce": Bench.all_reduce,
}


def num_slots(requested: int | None) -> tuple[str, int]:
    """The kind of this node's devices and how many are tested: `requested`, else all GPUs, or one slot on CPU."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = "cuda" if num_gpus else "cpu"
    return kind, min(requested or num_gpus, num_gpus) if num_gpus else requested or 1


def describe(kind: str) -> str:
    """This process's device and the libraries that drive it."""
    if kind == "cpu":
        return f"{platform.processor() or platform.machine()}, torch {torch.__version__}, gloo"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {nccl}"
