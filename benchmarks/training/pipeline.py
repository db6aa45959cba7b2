"""Pipeline bubble compared with the formula: two stages on two processes, 1F1B, equal micro-batches.

An update of m micro-batches takes (m + p - 1) t on p stages that take t each, so the bubble is (p - 1) / m of the ideal
m t. t is the time of one additional micro-batch, from the two largest m. The optimizer step is not timed.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.result import Result
from benchmarks.sizes import size
from benchmarks.training.actor_task import PROMPT, actor_config, trajectories, write_model

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.actor import MegatronActor

STAGES = 2
COUNTS = (1, 2, 4, 8, 16)
RESPONSE = size(224, 8)
REPEATS = size(3, 1)


def run() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="mcore_rl_pipeline_") as directory:
        write_model(Path(directory) / "model")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(STAGES, mp_context=context) as pool:  # raises if a process dies
            ranks = list(pool.map(_rank, range(STAGES), [directory] * STAGES))
    # An update ends on its slowest rank.
    seconds = {count: max(rank[count] for rank in ranks) for count in COUNTS}
    few, many = COUNTS[-2:]
    # The difference contains no bubble and no fixed cost.
    each = (seconds[many] - seconds[few]) / (many - few)
    note = f"{STAGES} stages, 1F1B, {each * 1e3:.0f} ms per micro-batch; medians of {REPEATS}"
    rows = []
    for count in COUNTS[1:-1]:
        measured, formula = seconds[count] / (count * each) - 1, (STAGES - 1) / count
        rows.append(Result(f"bubble, {count} micro-batches", measured, formula, "", measured / formula, note=note))
    return rows


def _rank(rank: int, directory: str) -> dict[int, float]:
    """Measure the seconds of forward and backward by number of micro-batches."""
    from mcore_rl.megatron.model import parallel
    from mcore_rl.megatron.roles.actor import MegatronActor

    torch.set_num_threads(1)
    model = Path(directory) / "model"
    config = actor_config(model, tokens_per_microbatch=RESPONSE + PROMPT, pp=STAGES)
    actor = MegatronActor(config, rank, STAGES, f"file://{directory}/store")
    try:
        return {count: _seconds(actor, count) for count in COUNTS}
    finally:
        parallel.destroy()


def _seconds(actor: MegatronActor, count: int) -> float:
    import torch.distributed as dist

    share, buffers = trajectories(np.full(count, RESPONSE))
    times = []
    for repeat in range(REPEATS + 1):
        batch, _ = actor.recompute_logp([share], [buffers])
        dist.barrier()  # the forward pass ends on one stage before the other
        start = time.perf_counter()
        actor.accumulate_gradients(batch, 0)
        if repeat:
            times.append(time.perf_counter() - start)
    return statistics.median(times)
