"""Profiles of ranks: contents of the files, and the steps and ranks that record them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl.runtime import rank_profile
from mcore_rl.runtime.rank_profile import RankProfile
from mcore_rl.runtime.spans import SpanRecorder
from mcore_rl.runtime.step_profiler import StepProfiler


def test_profile_has_operators_and_spans_of_its_time_only(tmp_path: Path) -> None:
    recorder, one = SpanRecorder("rank 0"), torch.ones(4, 4, requires_grad=True)
    torch.sin(one)
    profile = RankProfile()
    recorder.annotate = profile.annotate
    with recorder.span("update"):
        (one @ one).sum().backward()
    profile.write(tmp_path / "profile" / "step_3_rank_0")
    torch.cos(one)
    # Neither a snapshot of GPU memory nor a partial file.
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "step_3_rank_0.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    # The backward pass runs in another thread.
    assert {"update", "aten::mm", "MmBackward0"} <= names
    assert {"aten::sin", "aten::cos"}.isdisjoint(names)
    assert [span.name for span in recorder.drain()] == ["update"]


class FakeGpu:
    """Recorder of the calls of torch.cuda that a profile makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[object, ...]] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        # The profiler of a CPU build cannot record kernels.
        cpu = [torch.profiler.ProfilerActivity.CPU]
        monkeypatch.setattr(rank_profile, "profile", lambda activities, **_: torch.profiler.profile(activities=cpu))
        nvtx = SimpleNamespace(
            range_push=lambda name: self.calls.append(("push", name)), range_pop=lambda: self.calls.append(("pop",))
        )
        monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._record_history)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))

    def _record_history(self, enabled: str | None = "all", **options: object) -> None:
        self.calls.append(("history", enabled))


def test_profile_on_a_gpu_has_nvtx_ranges_named_as_the_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, recorder = FakeGpu(monkeypatch), SpanRecorder("rank 0")
    with recorder.span("before"):
        profile = RankProfile()
    recorder.annotate = profile.annotate
    with recorder.span("update"), pytest.raises(RuntimeError, match="lost"), recorder.span("forward {0}"):
        raise RuntimeError("lost")
    profile.write(tmp_path / "step_1_rank_0")
    ranges = [("push", "update"), ("push", "forward {0}"), ("pop",), ("pop",)]
    assert gpu.calls == [("history", "all"), *ranges, ("history", None)]
    assert [span.name for span in recorder.drain()] == ["before", "forward {0}", "update"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1_rank_0.json.gz", "step_1_rank_0.memory.pickle"]


def test_spans_without_a_profile_enter_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, recorder = FakeGpu(monkeypatch), SpanRecorder("rank 0")
    with recorder.span("update"):
        pass
    assert gpu.calls == []


class Rank:
    """Handle of a rank that records the names and arguments of its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def call(self, method: Any, *arguments: str) -> None:
        self.calls.append((method.__name__, *arguments))


def test_step_profiler_calls_chosen_ranks_in_chosen_steps(tmp_path: Path) -> None:
    ranks, notes, waits = [Rank(), Rank(), Rank()], list[str](), list[int]()
    watch = SimpleNamespace(get=lambda calls: waits.append(len(calls)))
    profiler = StepProfiler(ranks, watch, tmp_path, [2, 3, 3], [0, 2, 2], notes.append)  # type: ignore[arg-type]
    for step in (1, 2, 3, 4):
        profiler.begin(step)
        profiler.end(step)
    assert [len(rank.calls) for rank in ranks] == [4, 0, 4]
    assert ranks[2].calls[2:] == [("start_profile",), ("write_profile", str(tmp_path / "profile" / "step_3_rank_2"))]
    assert waits == [2, 2, 2, 2]
    assert [note.partition(":")[0] for note in notes] == ["profiles of step 2", "profiles of step 3"]
