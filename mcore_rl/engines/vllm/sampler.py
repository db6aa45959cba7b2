"""Sampling in vLLM 0.32 with the noise of engines.noise.

Importing this module replaces vLLM's functions, on every engine rank. vLLM samples with one random generator per
request, whose state an abort loses; here only the generator's initial seed is used.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from mcore_rl.engines.drafts import row_requests
from mcore_rl.engines.noise import noise_keys, sample_tokens

_noise_keys: torch.Tensor | None = None
"""Noise keys of the rows of the pass that is being sampled."""

_upstream_sample = GPUModelRunner._sample


def request_seeds(batch: InputBatch) -> list[int]:
    """Return the seed of each request; 0 for greedy requests, which have none."""
    seeds = [0] * batch.num_reqs
    for row, generator in batch.generators.items():
        seeds[row] = generator.initial_seed()
    return seeds


def _sample(
    self: GPUModelRunner, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
) -> SamplerOutput:
    """Wrap GPUModelRunner._sample to compute the noise keys of its rows."""
    global _noise_keys
    batch = self.input_batch
    seeds = request_seeds(batch)
    # The number of tokens so far is the position of the token to sample. It counts the drafts of this pass.
    positions = self.optimistic_seq_lens_cpu[: batch.num_reqs].numpy()
    if spec_decode_metadata is not None:
        requests, places = row_requests(spec_decode_metadata.num_draft_tokens)
        positions = (positions - spec_decode_metadata.num_draft_tokens)[requests] + places
        seeds = [seeds[request] for request in requests]
    _noise_keys = noise_keys(seeds, positions)
    try:
        return _upstream_sample(self, logits, spec_decode_metadata)
    finally:
        _noise_keys = None


def _forward(
    self: TopKTopPSampler,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replace TopKTopPSampler.forward_*. Returns the tokens and the truncated log-probabilities.

    Shapes: logits [rows, V] -> tokens [rows], logp float32 [rows, V].
    """
    # vLLM's profiling pass calls the sampler without a batch. It samples too: vLLM then measures the memory of a step's
    # sampling, and the kernel is compiled before the first request.
    keys = torch.zeros(len(logits), dtype=torch.int64) if _noise_keys is None else _noise_keys
    logp = apply_top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
    return sample_tokens(logp.exp(), keys.to(logp.device, non_blocking=True)), logp


_upstream_bookkeeping = GPUModelRunner._bookkeeping_sync


def _bookkeeping_sync(self: GPUModelRunner, *args: object, **kwargs: object) -> object:
    """Wrap GPUModelRunner._bookkeeping_sync without the generators of rows whose prompt is not complete.

    vLLM would rewind their offset. Nothing was sampled from them: a GPU's offset would become 2**64 - 4, and CPU
    generators have no offset.
    """
    generators = self.input_batch.generators
    unfinished = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
    hidden = {row: generators.pop(row) for row in unfinished if row in generators}
    try:
        return _upstream_bookkeeping(self, *args, **kwargs)
    finally:
        generators.update(hidden)


GPUModelRunner._sample = _sample
# CPUModelRunner inherits it.
GPUModelRunner._bookkeeping_sync = _bookkeeping_sync
TopKTopPSampler.forward_native = TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_cuda = _forward
