"""Profile of one trainer rank by torch.profiler, a snapshot of its GPU memory, and NVTX ranges for Nsight Systems."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

TRACE, SNAPSHOT = ".json.gz", ".memory.pickle"
MAX_MEMORY_EVENTS = 200_000
"""Allocations and frees that a snapshot has at most, the last ones."""


class RankProfile:
    """Profile from its construction to `write`, which must run in the same thread: torch.profiler records the operators
    of that thread and of the backward pass. Kernels and allocations on the GPU are recorded for the whole process."""

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS, stacks="python")
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    @contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        """Mark the block as a range in the trace and, on a GPU, as an NVTX range of the same name."""
        with record_function(name):
            # A CPU build of torch has no NVTX.
            if not self._on_gpu:
                yield
                return
            torch.cuda.nvtx.range_push(name)
            try:
                yield
            finally:
                torch.cuda.nvtx.range_pop()

    def write(self, path: Path) -> None:
        """Stop, and write `path`.json.gz (Chrome trace format) and, on a GPU, `path`.memory.pickle."""
        if self._on_gpu:
            torch.cuda.synchronize()  # kernels that still run belong to the step
        self._profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        # torch compresses if the name ends in .gz. Other names could be taken for complete files.
        partial = path.with_name(f".{path.name}{TRACE}")
        self._profile.export_chrome_trace(str(partial))
        os.replace(partial, f"{path}{TRACE}")
        if self._on_gpu:
            torch.cuda.memory._dump_snapshot(str(partial))
            os.replace(partial, f"{path}{SNAPSHOT}")
            torch.cuda.memory._record_memory_history(enabled=None)
