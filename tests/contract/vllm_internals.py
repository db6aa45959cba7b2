"""Functions of contract tests that run in the process of a vLLM engine, which is their first argument."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mcore_rl.engines import noise


def run_norms(engine: Any, build: Any) -> dict[str, Any]:
    """Run vLLM's norm operations as this engine dispatches them, and in eager torch."""
    from vllm import ir

    heads, row, residual, weight = (torch.from_numpy(x) for x in build)
    view = heads[:, 1:3]  # strided like queries in a fused projection
    found = {"provider": [op.get_priority()[0] for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)]}
    for name, op, inputs in (
        ("norm", ir.ops.rms_norm, (view, weight, 1e-6)),
        ("fused", ir.ops.fused_add_rms_norm, (row, residual, weight, 1e-6)),
    ):
        for kind, function in (("native", op.impls["native"].impl_fn), ("ours", op)):
            results = function(*(x.clone() if x is row or x is residual else x for x in inputs))
            found[f"{name} {kind}"] = [r.numpy() for r in (results if isinstance(results, tuple) else (results,))]
    return found


def profile_sampler(engine: Any) -> tuple[int, list[int]]:
    """Run vLLM's profiling pass of the sampler. Returns its rows, and the noise drawn in each call."""
    upstream, calls = noise.log_uniform, []

    def recorded(keys: torch.Tensor, columns: int) -> torch.Tensor:
        calls.append(len(keys) * columns)
        return upstream(keys, columns)

    def sample(worker: Any) -> int:
        runner = worker.model_runner
        hidden = torch.zeros(32, runner.model_config.get_hidden_size(), dtype=runner.dtype, device=runner.device)
        return len(runner._dummy_sampler_run(hidden).sampled_token_ids)

    noise.log_uniform = recorded
    try:
        return engine._engine.model_executor.collective_rpc(sample)[0], calls
    finally:
        noise.log_uniform = upstream


def rows_with_generators(engine: Any) -> tuple[list[int], list[int]]:
    """Return the rows with a generator that vLLM's bookkeeping sees if the prompt of row 1 is incomplete, and those
    with a generator afterwards."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from mcore_rl.engines.vllm import sampler

    batch = SimpleNamespace(generators=dict.fromkeys(range(3)), num_reqs=3)
    mask = SimpleNamespace(np=np.array([False, True, False, True]))
    seen: list[int] = []
    upstream, sampler._upstream_bookkeeping = sampler._upstream_bookkeeping, lambda _: seen.extend(batch.generators)
    try:
        GPUModelRunner._bookkeeping_sync(SimpleNamespace(input_batch=batch, discard_request_mask=mask))
    finally:
        sampler._upstream_bookkeeping = upstream
    return seen, sorted(batch.generators)


def proposed_lengths(engine: Any, lengths: list[int], num_sampled: int) -> list[int]:
    """Return the lengths of the drafts for requests of these lengths, in which a single token repeats."""

    def propose(worker: Any) -> list[int]:
        sampled, tokens = [[7] * num_sampled for _ in lengths], np.full((len(lengths), max(lengths)), 7)
        drafts = worker.model_runner.drafter.propose(sampled, np.array(lengths), tokens)
        return [len(draft) for draft in drafts]

    found: list[int] = engine._engine.model_executor.collective_rpc(propose)[0]
    return found
