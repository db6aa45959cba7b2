"""Makes vLLM 0.32 draw tokens as engines.noise says.

Importing this module puts its functions in the place of vLLM's, on every engine rank. vLLM draws from a generator per
request, one after the other, whose state is lost with an abort; here it says no more than the request's seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from mcore_rl.engines.noise import noise_keys, sample_tokens

_noise_keys: torch.Tensor | None = None
"""Of the rows of the pass that is sampled."""

_upstream_pass = GPUModelRunner._sample


def _sample_pass(self: GPUModelRunner, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
    """GPUModelRunner._sample, which says whose rows they are. Greedy requests have no seed, and need none."""
    global _noise_keys
    batch = self.input_batch
    seeds = [0] * batch.num_reqs
    for row, generator in batch.generators.items():
        seeds[row] = generator.initial_seed()
    _noise_keys = noise_keys(seeds, self.optimistic_seq_lens_cpu[: batch.num_reqs].numpy())
    try:
        return _upstream_pass(self, logits, spec_decode_metadata)
    finally:
        _noise_keys = None


_upstream_draw = TopKTopPSampler.forward_native


def _draw(
    self: TopKTopPSampler,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """TopKTopPSampler.forward_*. Shapes: logits [rows, V] -> tokens [rows], and what logprobs_mode asks for."""
    if _noise_keys is None:  # a pass that only measures memory
        return _upstream_draw(self, logits, generators, k, p)
    logp = apply_top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
    return sample_tokens(logp.exp(), _noise_keys.to(logp.device, non_blocking=True)), logp


_upstream_bookkeeping = CPUModelRunner._bookkeeping_sync


def _bookkeeping_sync(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    """CPUModelRunner._bookkeeping_sync, which would rewind the generators of rows whose prompt is not complete by their
    offset; those of the CPU have none, and nothing was drawn."""
    generators = self.input_batch.generators
    unfinished = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
    hidden = {row: generators.pop(row) for row in unfinished if row in generators}
    try:
        return _upstream_bookkeeping(self, *args, **kwargs)
    finally:
        generators.update(hidden)


GPUModelRunner._sample = _sample_pass
TopKTopPSampler.forward_native = TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_cuda = _draw
if current_platform.is_cpu():
    CPUModelRunner._bookkeeping_sync = _bookkeeping_sync
