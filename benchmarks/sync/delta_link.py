"""Seconds of a weight sync with weights.delta between two processes whose link has 1 Gbit/s, beside a whole sync.

Both are in network namespaces of their own. The weights change by updates of a real Adam between the syncs.
"""

from __future__ import annotations

import statistics

import torch

from benchmarks.result import Result
from benchmarks.sizes import size
from benchmarks.sync.limited_link import ADDRESSES, enter, limited_link
from benchmarks.sync.processes import SyncProcesses, processes, sync_plan
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.sync_plan import SyncPlan
from model_converters.mapping.layout import TrainLayout

CASES = ((1e-6, 1), (3e-6, 8))
"""Learning rate, and updates between two syncs."""
LAYERS, ROUNDS = size(4, 1), size(5, 1)
RATE, RATE_BYTES = "1gbit", 125e6
BUCKET_MIB = 16.0


def run() -> list[Result]:
    torch.set_num_threads(1)
    results = []
    with limited_link(RATE) as namespaces:
        enter(namespaces["A"])
        for lr, updates in CASES:
            plans = [_plan(delta) for delta in (False, True)]
            with (
                processes(plans[0], keep=False, engine_network=namespaces["B"]) as whole,
                processes(plans[1], keep=False, engine_network=namespaces["B"], adam_lr=lr) as delta,
            ):
                results.append(_seconds(whole, delta, f"lr {lr:.0e}, {updates} update(s)", updates))
    return results


def _plan(delta: bool) -> SyncPlan:
    return sync_plan(
        TrainLayout(1),
        EngineLayout(),
        ("A", "B"),
        bucket_mib=BUCKET_MIB,
        layers=LAYERS,
        addresses=(ADDRESSES["A"], ADDRESSES["B"]),
        delta=delta,
    )


def _seconds(whole: SyncProcesses, delta: SyncProcesses, name: str, updates: int) -> Result:
    """Compare the seconds of updates. The first one of each connection sends all bytes."""
    for each in (whole, delta):
        each.update()
    pairs = []
    for _ in range(ROUNDS):
        delta.train(updates)
        pairs.append((whole.update()[0], delta.update()[0]))
    num_bytes = whole.sent_bytes
    before, after = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    ratio = statistics.median(seconds / with_delta for seconds, with_delta in pairs)
    note = f"whole: {num_bytes / before / RATE_BYTES:.0%} of the link's rate"
    title = f"seconds of {num_bytes / 2**20:.0f} MiB at 1 Gbit/s, {name}, beside a whole sync"
    return Result(title, after, before, "s", ratio, ">= 3", note)
