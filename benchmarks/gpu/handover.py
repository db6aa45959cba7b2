"""Weights of one process's GPU to another process's tensors on it, through shared memory, beside a copy on the device.

The writer's side is the trainer's own (BucketWriter), the receiver copies each tensor of a bucket to where it is kept.
Pinned: both processes register the shared segment with CUDA, so that copies go at the bus's full rate.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from benchmarks.gpu.clock import medians, synchronize
from benchmarks.gpu.machine import require
from benchmarks.handover import hand_over, layer_plans
from benchmarks.result import Result
from mcore_rl.weights.plan import BucketSpec, plan_buckets
from mcore_rl.weights.receive import BucketReceiver
from mcore_rl.weights.transports.shared_memory import SharedBuckets
from mcore_rl.weights.verify import digest
from mcore_rl.weights.write import BucketWriter

LAYERS, BUCKET_MIB, ROUNDS = 12, 64.0, 7
WAYS = {"staged": 2, "at once": 1 << 10}
"""Slots of the ring: two, or as many as there are buckets."""


@dataclass(frozen=True)
class HandOver:
    """Medians of one way to hand over. `sent` and `arrived` are digests of both sides' tensors by name.

    Units: seconds.
    """

    spec: BucketSpec
    seconds: float
    copy_seconds: float
    sent: dict[str, str]
    arrived: dict[str, str]

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.spec.total_bytes / self.seconds

    @property
    def copy_rate(self) -> float:
        """Bytes per second of a copy on the device, each read once and written once."""
        return self.spec.total_bytes / self.copy_seconds


def run(
    device: str = "cuda", layers: int = LAYERS, bucket_mib: float = BUCKET_MIB, rounds: int = ROUNDS
) -> list[Result]:
    require(device)
    results = []
    for way, slots in WAYS.items():
        for pinned in (False, True) if device == "cuda" else (False,):
            over = measure(device, layers=layers, bucket_mib=bucket_mib, num_slots=slots, rounds=rounds, pinned=pinned)
            assert over.arrived == over.sent
            assert (over.spec.num_buckets <= over.spec.num_slots) == (way == "at once")
            size = f"{over.spec.total_bytes / 2**20:.0f} MiB, {over.spec.num_buckets} buckets"
            rate, limit = over.rate / 1e9, over.copy_rate / 1e9
            name = f"{way}, {'pinned' if pinned else 'unpinned'}, {size}"
            results.append(Result(name, rate, limit, "GB/s", rate / limit, note="the limit is one copy on the device"))
    return results


def measure(device: str, *, layers: int, bucket_mib: float, num_slots: int, rounds: int, pinned: bool) -> HandOver:
    """Hands random weights over, `rounds` times after one that warms up."""
    plans = layer_plans(layers)
    tensors = {plan.hf_name: torch.randn(plan.shape, device=device).to(plan.dtype) for plan in plans}
    buckets = SharedBuckets.create(plan_buckets(plans, int(bucket_mib * 2**20), num_slots))
    context = multiprocessing.get_context("spawn")  # a process that has a CUDA context must not fork
    connection, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs, buckets.spec, device, pinned), daemon=True)
    process.start()
    connection.recv()
    buckets.unlink()
    writer = BucketWriter(buckets.spec, buckets, plans, 0)
    with registered(buckets, wanted=pinned):
        seconds = [hand_over(writer, buckets.spec, tensors, connection) for _ in range(rounds + 1)][1:]
    connection.send(None)
    arrived = connection.recv()
    process.join()
    return HandOver(
        buckets.spec,
        statistics.median(seconds),
        _copy_seconds(buckets.spec.total_bytes, device),
        {name: digest(tensor) for name, tensor in tensors.items()},
        arrived,
    )


@contextmanager
def registered(buckets: SharedBuckets, *, wanted: bool) -> Iterator[None]:
    """Within the block CUDA knows the segment's mapping in this process as pinned memory, if that is `wanted`.

    Raises: CudaError.
    """
    if not wanted:
        yield
        return
    address = buckets.view(0, buckets.spec.buckets[0][0]).data_ptr()
    num_bytes = buckets.spec.slot_bytes * buckets.spec.num_slots
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
    try:
        yield
    finally:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


def _receive(connection: Connection, spec: BucketSpec, device: str, pinned: bool) -> None:
    """The engine's process: acknowledges each bucket once its tensors are on the device; told None, it sends digests
    of what it has."""
    torch.set_num_threads(1)
    buckets = SharedBuckets.attach(spec)
    entries = [entry for bucket in spec.buckets for entry in bucket]
    kept = {entry.name: torch.zeros(entry.shape, dtype=entry.dtype, device=device) for entry in entries}

    def put(name: str, start: tuple[int, ...], box: torch.Tensor) -> None:
        place = tuple(slice(first, first + length) for first, length in zip(start, box.shape, strict=True))
        kept[name][place].copy_(box, non_blocking=True)

    receiver = BucketReceiver(buckets)
    with registered(buckets, wanted=pinned):
        connection.send(0)
        while (index := connection.recv()) is not None:
            if index == 0:
                receiver.begin()
            num_bytes = receiver.receive(index, put)
            synchronize(device)  # the copies are done: the slot may change
            connection.send(num_bytes)
            if index == spec.num_buckets - 1:
                receiver.finish()
    connection.send({name: digest(tensor) for name, tensor in kept.items()})


def _copy_seconds(num_bytes: int, device: str) -> float:
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    (seconds,) = medians([lambda: target.copy_(source)], device)
    return seconds
