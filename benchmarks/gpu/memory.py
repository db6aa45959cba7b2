"""Peak memory of an update, compared with the plan for the layers that this machine builds.

Without a GPU, the resident memory of the process replaces the device's memory; this only shows that the code runs.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.machine import require
from benchmarks.gpu.models import LOADS, ModelLoad, configure, filled, one_actor
from benchmarks.result import Result
from benchmarks.sizes import size
from benchmarks.timing import memory_bytes, reset_peak
from benchmarks.training.actor_task import PROMPT, trajectories, write_model

GIB = 2**30
AIM = "<= 1.1"
RECOMPUTE = size(("none", "selective", "full"), ("full",))


def run(device: str = "cuda") -> list[Result]:
    require(device)
    return [_measure(replace(load, recompute=recompute), device) for load in LOADS for recompute in RECOMPUTE]


def _measure(load: ModelLoad, device: str) -> Result:
    # Full rows of full-length sequences, as in the plan.
    responses = np.full(load.responses, load.longest)
    planned = planned_bytes(load, device)
    with one_actor(load, device) as (actor, fields):
        share, buffers = trajectories(responses)
        _start_anew(device)
        for _ in range(2):  # the first step creates the optimizer's state
            batch, _ = actor.recompute_logp([share], [buffers])
            actor.update(batch, 0)
        peak = _peak_bytes(device)
    # Both errors count: with too low a plan the run fails, with too high a plan GPUs are wasted.
    ratio = max(peak / planned, planned / peak)
    note = f"{fields['num_hidden_layers']} layers, rows of {load.budget} tokens; the ratio is larger / smaller"
    name = f"peak of an update, {load.name}, recompute {load.recompute}"
    return Result(name, peak / GIB, planned / GIB, "GiB", ratio, aim=AIM, note=note)


def planned_bytes(load: ModelLoad, device: str) -> int:
    """Return the planned state and activations of the update, for the packages that are installed here."""
    from mcore_rl.planner.plan import Job
    from mcore_rl.planner.stages import planned_stages
    from mcore_rl.planner.workload import batch_arithmetic
    from mcore_rl.resolved.installed import here

    with tempfile.TemporaryDirectory(prefix="mcore_rl_gpu_") as root:
        config = configure(write_model(Path(root) / "model", **filled(load, device)), load)
        config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = PROMPT, load.longest
        # A plan for exactly this batch, not for a mean over the batches of a run.
        config.plan.mean_response_fraction = 1.0
        config.rollout.samples_per_prompt = 1
        config.trainer.prompts_per_step = config.trainer.prompts_per_update = load.responses
        config.data.train = [root]  # required, but never read
        job = Job.of(config)
        implementation = job.spec.implementation(config.cluster.gpus_per_node, here())
        run = replace(job.run, fused=implementation.transformer_engine, cuda=torch.cuda.is_available())
        ((activations, (state,)),) = planned_stages(
            job.spec, run, batch_arithmetic(job.config, job.spec.layout).most_microbatches
        )
        return state.total_bytes + max(int(activations.total_bytes), state.piece_bytes)


def _start_anew(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return memory_bytes("VmHWM")
