"""Optimizer step with the state in host memory, compared with copying the same bytes over the bus.

The limit copies as many bytes in both directions at once, on two streams and pinned memory: the duration of a step that
overlaps both directions and its arithmetic.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu.clock import medians, synchronize
from benchmarks.gpu.machine import require
from benchmarks.gpu.models import DENSE, TINY, one_actor, size_of
from benchmarks.result import Result, compare
from benchmarks.sizes import size
from benchmarks.training.actor_task import trajectories

STATE_BYTES = 12
"""Bytes per parameter and direction: main parameter and two moments, in float32."""
PIECE_BYTES = size(1 << 28, 1 << 20)
"""Bytes that the limit copies at a time."""
LOAD = size(replace(DENSE, layers=8), TINY)


def run(device: str = "cuda") -> list[Result]:
    require(device)
    with one_actor(LOAD, device, cpu_offload=True) as (actor, fields):
        share, buffers = trajectories(np.full(LOAD.responses, LOAD.longest))
        # Only the optimizer step is timed; repeating it with the same gradients costs the same.
        actor.accumulate_gradients(actor.recompute_logp([share], [buffers])[0], 0)
        (seconds,) = medians([lambda: actor.optimizer.step()], device)
    parameters = size_of(fields).total
    limit = _both_ways(STATE_BYTES * parameters, device)
    note = f"{STATE_BYTES * parameters / 1e9:.2f} GB each way; {2 * STATE_BYTES * parameters / seconds / 1e9:.1f} GB/s"
    name = f"optimizer step in pieces, {parameters / 1e9:.2f}B parameters"
    return [compare(name, seconds * 1e3, limit * 1e3, "ms", note=note)]


def _both_ways(num_bytes: int, device: str) -> float:
    """Measure the seconds to copy `num_bytes` to the device and `num_bytes` back at the same time."""
    cuda = device == "cuda"
    host = [torch.zeros(PIECE_BYTES, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
    there = [torch.zeros(PIECE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if cuda else [None, None]
    # Rounded up; the time is scaled back to the exact number of bytes.
    pieces = -(-num_bytes // PIECE_BYTES)

    def copy() -> None:
        for _ in range(pieces):
            for direction, stream in enumerate(streams):
                source, target = (host[0], there[0]) if direction == 0 else (there[1], host[1])
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    target.copy_(source, non_blocking=True)
        synchronize(device)

    (seconds,) = medians([copy], device)
    return seconds * num_bytes / (pieces * PIECE_BYTES)
