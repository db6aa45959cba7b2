"""Weights of one process to tensors of another process on the same GPU, through shared memory, compared with a copy on
the device.

Both sides use the code of a run (benchmarks.sync.processes). Pinned: the trainer's process registers the staging
buffers with CUDA, so that its copies use the full bandwidth of the bus.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from benchmarks.gpu.clock import medians
from benchmarks.gpu.machine import require
from benchmarks.result import Result, compare
from benchmarks.sizes import size
from benchmarks.sync.processes import processes, sync_plan
from mcore_rl.weights.slices.engine_layout import EngineLayout
from model_converters.mapping.layout import TrainLayout

LAYERS, ROUNDS = size((12, 7), (1, 2))
WAYS = {"staged": 64.0, "at once": float(1 << 10)}
"""Bucket size in MiB."""


@dataclass(frozen=True)
class HandOver:
    """Medians of one bucket size. `sent` and `arrived` are digests of both sides' tensors by HF name.

    Units: seconds.
    """

    num_bytes: int
    num_rounds: int
    seconds: float
    copy_seconds: float
    sent: dict[str, str]
    arrived: dict[str, str]

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.num_bytes / self.seconds

    @property
    def copy_rate(self) -> float:
        """Bytes per second of a copy on the device, each read once and written once."""
        return self.num_bytes / self.copy_seconds


def run(device: str = "cuda") -> list[Result]:
    require(device)
    results = []
    for way, bucket_mib in WAYS.items():
        for pinned in (False, True) if device == "cuda" else (False,):
            over = measure(device, layers=LAYERS, bucket_mib=bucket_mib, rounds=ROUNDS, pinned=pinned)
            assert over.arrived == over.sent  # otherwise the rate means nothing
            rate, limit = over.rate / 1e9, over.copy_rate / 1e9
            amount = f"{over.num_bytes / 2**20:.0f} MiB, {over.num_rounds} buckets"
            name = f"{way}, {'pinned' if pinned else 'unpinned'}, {amount}"
            results.append(compare(name, rate, limit, "GB/s", note="the limit is one copy on the device"))
    return results


def measure(device: str, *, layers: int, bucket_mib: float, rounds: int, pinned: bool) -> HandOver:
    """Sync random weights `rounds` times, after a warm-up."""
    plan = sync_plan(TrainLayout(1), EngineLayout(), ("A", "A"), bucket_mib=bucket_mib, layers=layers)
    with processes(plan, device=device, pinned=pinned) as sync:
        seconds = [sync.update()[0] for _ in range(rounds + 1)][1:]
        sent, arrived = sync.digests()
    num_bytes = sync.sent_bytes
    return HandOver(
        num_bytes, plan.num_rounds, statistics.median(seconds), _copy_seconds(num_bytes, device), sent, arrived
    )


def _copy_seconds(num_bytes: int, device: str) -> float:
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    (seconds,) = medians([lambda: target.copy_(source)], device)
    return seconds
