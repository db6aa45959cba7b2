"""Profiles of ranks: contents of the files, and the steps and ranks that record them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import record_function

from mcore_rl.runtime.rank_profile import RankProfile
from mcore_rl.runtime.spans import SpanRecorder
from mcore_rl.runtime.step_profiler import StepProfiler


def test_profile_has_operators_and_spans_of_its_time_only(tmp_path: Path) -> None:
    recorder, one = SpanRecorder("rank 0"), torch.ones(4, 4, requires_grad=True)
    torch.sin(one)
    profile = RankProfile()
    recorder.annotate = record_function
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
