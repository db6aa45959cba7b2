"""Copy of another process's tensor on the same GPU through its CUDA IPC handle, compared with a copy on the device.

The result is an upper bound for weights.transport=cuda_ipc.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch
import torch.multiprocessing

from benchmarks.children import PipedChild
from benchmarks.gpu.clock import medians
from benchmarks.gpu.machine import require
from benchmarks.result import Result, compare
from benchmarks.sizes import size

NUM_BYTES = size(1 << 30, 1 << 20)
"""Size of the transferred buffer."""


def run(device: str = "cuda") -> list[Result]:
    require(device)
    source = torch.randint(0, 255, (NUM_BYTES,), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    handles = torch.multiprocessing.get_context("spawn").Queue()  # torch sends handles of tensors through its queues
    child = PipedChild(_copy, handles, device)
    try:
        handles.put(source)
        (alone,) = medians([lambda: target.copy_(source)], device)
        seconds, total = child.recv(tuple)
    finally:
        child.end()  # the source must exist until the other process has released it
    assert total == int(source.sum(dtype=torch.int64))
    # Each byte is read once and written once, on both sides of the comparison.
    rate, limit = NUM_BYTES / seconds / 1e9, NUM_BYTES / alone / 1e9
    return [compare(f"copy by IPC handle, {NUM_BYTES / 2**20:.0f} MiB", rate, limit, "GB/s")]


def _copy(connection: Connection, handles: torch.multiprocessing.Queue, device: str) -> None:
    source = handles.get()
    target = torch.zeros_like(source)
    (seconds,) = medians([lambda: target.copy_(source)], device)
    connection.send((seconds, int(target.sum(dtype=torch.int64))))
    connection.recv()
