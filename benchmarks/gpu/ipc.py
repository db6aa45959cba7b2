"""Copy from a staging buffer of another process on the same GPU, compared with a copy on the device.

The result is an upper bound for weights.transport=cuda_ipc.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

from benchmarks.children import PipedChild
from benchmarks.gpu.clock import medians, synchronize
from benchmarks.gpu.machine import require
from benchmarks.result import Result, compare
from benchmarks.sizes import size
from mcore_rl.weights.transports.segments import SEGMENTS

NUM_BYTES = size(1 << 30, 1 << 20)
"""Size of the transferred buffer."""


def run(device: str = "cuda") -> list[Result]:
    require(device)
    segment = SEGMENTS[device == "cuda"].create(NUM_BYTES)
    source = torch.randint(0, 255, (NUM_BYTES,), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    segment.memory[:NUM_BYTES].copy_(source)
    synchronize(device)
    child = PipedChild(_copy, segment.name, device)
    try:
        (alone,) = medians([lambda: target.copy_(source)], device)
        seconds, total = child.recv(tuple)
    finally:
        child.end()  # the reader must have unmapped the memory before its owner frees it
        segment.unlink()
        segment.close()
    assert total == int(source.sum(dtype=torch.int64))
    # Each byte is read once and written once, on both sides of the comparison.
    rate, limit = NUM_BYTES / seconds / 1e9, NUM_BYTES / alone / 1e9
    return [compare(f"copy by IPC handle, {NUM_BYTES / 2**20:.0f} MiB", rate, limit, "GB/s")]


def _copy(connection: Connection, name: str, device: str) -> None:
    segment = SEGMENTS[device == "cuda"].attach(name)
    target = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=device)
    (seconds,) = medians([lambda: target.copy_(segment.memory[:NUM_BYTES])], device)
    segment.close()
    connection.send((seconds, int(target.sum(dtype=torch.int64))))
