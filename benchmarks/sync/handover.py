"""Weight sync through shared memory, compared with one memcpy of the same bytes into warm memory.

Trainer and engine ranks are separate processes, as in a run: slices are packed, received and acknowledged. Each byte is
copied twice (parameter -> slot -> engine's tensor), so the limit is half the rate of a memcpy if both sides take turns;
on two cores, several slots let them overlap. In the `mapped` row, one bucket holds all weights and the engine copies
nothing.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch

from benchmarks.result import Result
from benchmarks.sizes import size
from benchmarks.sync.processes import processes, sync_plan
from benchmarks.timing import seconds_of
from mcore_rl.weights.slices.engine_layout import EngineLayout
from model_converters.mapping.layout import TrainLayout

ROUNDS = size(11, 1)
WAYS = (("the only rank", 64.0, 1, ">= 0.7"), ("two ranks", 64.0, 2, ">= 0.7"), ("mapped", 1024.0, 1, ">= 0.95"))
"""(name, MiB of a bucket, ranks of the engine, aim)."""


def run() -> list[Result]:
    torch.set_num_threads(1)
    results = []
    for name, bucket_mib, num_ranks, aim in WAYS:
        plan = sync_plan(TrainLayout(1), EngineLayout(tp=num_ranks), ("A", "A" * num_ranks), bucket_mib=bucket_mib)
        with processes(plan, keep=name != "mapped") as sync:
            ratios, rates = [], []
            source, target = (torch.ones(sync.sent_bytes, dtype=torch.uint8) for _ in range(2))
            sync.update()  # touches all pages
            for _ in range(ROUNDS):
                limit = seconds_of(partial(target.copy_, source))
                seconds, received = sync.update()
                assert sum(received) == sync.sent_bytes
                ratios.append(limit / seconds)
                rates.append(sync.sent_bytes / seconds)
        title = f"{name}, {sync.sent_bytes / 2**20:.0f} MiB in {plan.num_rounds} bucket(s)"
        ratio, rate = statistics.median(ratios), statistics.median(rates)
        results.append(Result(title, rate / 1e9, rate / ratio / 1e9, "GB/s", ratio, aim))
    return results
