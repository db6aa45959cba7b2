"""Weight hand-over through shared memory against one memcpy of the same bytes into warm memory, in one run.

A writer process fills buckets, a receiver process takes them, as in a run: every bucket is written, received and
acknowledged. A rank that takes everything copies it twice (parameter -> slot -> its own memory), so half a memcpy is
the limit while writer and reader take turns; with two cores the ring lets them overlap. A rank of two takes half.
Mapped is the hand-over alone: all buckets are in place at once, and nothing is taken out of them.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import torch

from benchmarks.result import Result
from mcore_rl.weights.plan import BucketSpec, plan_buckets
from mcore_rl.weights.receive import BucketReceiver
from mcore_rl.weights.transports.shared_memory import SharedBuckets
from mcore_rl.weights.write import BucketWriter
from model_converters.mapping.plan import Piece, TensorPlan

HIDDEN, INNER, EXPERTS, LAYERS = 1024, 768, 8, 12
SLOTS, ROUNDS = 2, 11
WAYS = (("the only rank", 32.0, 1, ">= 0.45"), ("a rank of two", 32.0, 2, ">= 0.45"), ("mapped", 1024.0, 0, ">= 0.8"))
"""(name, MiB of a bucket, ranks of the engine, aim)."""


def layer_plans(num_layers: int) -> list[TensorPlan]:
    """Attention and experts of a mixture-of-experts layer in bfloat16, each expert tensor its own."""
    plans = []
    for layer in range(num_layers):
        shapes = {"qkv": (2048, HIDDEN), "o": (HIDDEN, 1024), "norm": (HIDDEN,)}
        for expert in range(EXPERTS):
            shapes |= {f"{expert}.gate": (INNER, HIDDEN), f"{expert}.up": (INNER, HIDDEN)}
            shapes |= {f"{expert}.down": (HIDDEN, INNER)}
        for name, shape in shapes.items():
            name = f"layers.{layer}.{name}"
            pieces = (Piece(0, name, 0, 0, 0, shape[0], 0),)
            plans.append(TensorPlan(name, shape, torch.bfloat16, f"layer.{layer}", pieces))
    return plans


def receive(connection: Connection, spec: BucketSpec, num_ranks: int) -> None:
    """The engine's process, rank 0 of num_ranks: keeps its part of each bucket it is told of (0 ranks: nothing) and
    acknowledges it, until told None."""
    torch.set_num_threads(1)
    receiver = BucketReceiver(SharedBuckets.attach(spec))
    entries = [entry for bucket in spec.buckets for entry in bucket]
    kept = {entry.name: torch.zeros(entry.shape, dtype=entry.dtype) for entry in entries}

    def put(name: str, start: tuple[int, ...], box: torch.Tensor) -> None:
        rows = len(box) // num_ranks if num_ranks else 0
        kept[name][start[0] : start[0] + rows].copy_(box[:rows])

    connection.send(0)
    while (index := connection.recv()) is not None:
        if index == 0:
            receiver.begin()
        connection.send(receiver.receive(index, put))
        if index == spec.num_buckets - 1:
            receiver.finish()


def hand_over(
    writer: BucketWriter, spec: BucketSpec, tensors: dict[str, torch.Tensor], connection: Connection
) -> float:
    """Seconds of one update. Slot i % num_slots is written again only after its last bucket was acknowledged."""
    started = time.perf_counter()
    acknowledged = 0
    for index in range(spec.num_buckets):
        if index - acknowledged >= spec.num_slots:
            connection.recv()
            acknowledged += 1
        writer.write(index, tensors)
        connection.send(index)
    while acknowledged < spec.num_buckets:
        connection.recv()
        acknowledged += 1
    return time.perf_counter() - started


def memcpy(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and destination of the same number of bytes, both warm."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    return torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)


def measure(num_layers: int, bucket_mib: float, num_ranks: int, rounds: int) -> tuple[BucketSpec, float, float]:
    """(spec, median ratio to memcpy, bytes per second); memcpy and hand-over alternate."""
    plans = layer_plans(num_layers)
    tensors = {plan.hf_name: torch.randn(plan.shape).to(plan.dtype) for plan in plans}
    buckets = SharedBuckets.create(plan_buckets(plans, int(bucket_mib * 2**20), SLOTS))
    spec = buckets.spec
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, spec, num_ranks), daemon=True)
    process.start()
    connection.recv()
    buckets.unlink()
    writer = BucketWriter(spec, buckets, plans, 0)
    source, target = memcpy(tensors)
    hand_over(writer, spec, tensors, connection)
    ratios, rates = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        target.copy_(source)
        limit = time.perf_counter() - started
        seconds = hand_over(writer, spec, tensors, connection)
        ratios.append(limit / seconds)
        rates.append(spec.total_bytes / seconds)
    connection.send(None)
    process.join()
    return spec, statistics.median(ratios), statistics.median(rates)


def run() -> list[Result]:
    torch.set_num_threads(1)
    results = []
    for name, bucket_mib, num_ranks, aim in WAYS:
        spec, ratio, rate = measure(LAYERS, bucket_mib, num_ranks, ROUNDS)
        title = f"{name}, {spec.total_bytes / 2**20:.0f} MiB in {spec.num_buckets} bucket(s)"
        results.append(Result(title, rate / 1e9, rate / ratio / 1e9, "GB/s", ratio, aim))
    return results
