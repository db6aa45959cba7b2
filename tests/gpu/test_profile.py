"""Profile of a rank on a GPU: kernels in the trace, allocations in the memory snapshot, and ranges."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from mcore_rl.runtime.rank_profile import RankProfile


@pytest.mark.cuda(only=True)
def test_profile_on_a_gpu_has_kernels_spans_and_a_memory_snapshot(tmp_path: Path) -> None:
    profile = RankProfile()
    large = torch.ones(3 << 20, device="cuda")
    # Also an NVTX range, which only Nsight Systems can read back.
    with profile.annotate("update"):
        large @ large
    profile.write(tmp_path / "step_1_rank_0")
    events = json.loads(gzip.decompress((tmp_path / "step_1_rank_0.json.gz").read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert "update" in {event.get("name") for event in events}
    snapshot = pickle.loads((tmp_path / "step_1_rank_0.memory.pickle").read_bytes())
    sizes = [entry["size"] for trace in snapshot["device_traces"] for entry in trace if entry["action"] == "alloc"]
    assert 4 * (3 << 20) in sizes
