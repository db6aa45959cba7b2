"""Sampling in vLLM 0.32 with the noise of engines.noise.

Importing this module replaces vLLM's functions, on every engine rank. vLLM samples with one random generator per
request, whose state an abort loses; here only the generator's initial seed is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from mcore_rl.engines.drafts import row_requests
from mcore_rl.engines.noise import noise_keys, sample_tokens
from mcore_rl.engines.set_recorder import SetRecorder

KEEP_SET = "keep_set"
"""Key of SamplingParams.extra_args: record the set that each token of the request is sampled from."""
_recorder: SetRecorder | None = None
"""Recorder of this rank; None unless start_set_capture was called."""
_recorded: tuple[list[int], list[str], list[int]] = [], [], []
"""Rows of the pass that is being sampled whose sets are recorded, with request and position."""
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
    """Wrap GPUModelRunner._sample to compute the noise keys of its rows, and the rows to record."""
    global _noise_keys, _recorded
    batch = self.input_batch
    seeds = request_seeds(batch)
    # The number of tokens so far is the position of the token to sample. It counts the drafts of this pass.
    positions = self.optimistic_seq_lens_cpu[: batch.num_reqs].numpy()
    requests = np.arange(batch.num_reqs)
    if spec_decode_metadata is not None:
        requests, places = row_requests(spec_decode_metadata.num_draft_tokens)
        positions = (positions - spec_decode_metadata.num_draft_tokens)[requests] + places
        seeds = [seeds[request] for request in requests]
    _noise_keys = noise_keys(seeds, positions)
    if _recorder is not None:
        _recorded = _rows_to_record(self, requests, positions)
    try:
        return _upstream_sample(self, logits, spec_decode_metadata)
    finally:
        _noise_keys, _recorded = None, ([], [], [])


def _rows_to_record(
    runner: GPUModelRunner, requests: np.ndarray, positions: np.ndarray
) -> tuple[list[int], list[str], list[int]]:
    """Return the rows of requests with KEEP_SET, their requests and positions. Shapes: requests, positions [rows].

    Samples that vLLM discards are left out: a pass over a piece of the known tokens, for example after a preemption,
    can end within the response, whose sets must stay.
    """
    names, discarded = runner.input_batch.req_ids, runner.discard_request_mask.np
    extra = [runner.requests[name].sampling_params.extra_args or {} for name in names]
    records = [KEEP_SET in extra[number] and not discarded[number] for number in range(len(names))]
    rows = [row for row, request in enumerate(requests.tolist()) if records[request]]
    return rows, [names[requests[row]] for row in rows], positions[rows].tolist()


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
    rows, requests, at = _recorded
    if _recorder is not None and rows:
        # Truncation, also by vLLM's min-p before this function, has set the logits of all other entries to -inf.
        _recorder.record(requests, at, (logp > -torch.inf)[rows])
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


class SetExtension:
    """Mixin for vLLM's Worker. All ranks of an engine sample the same tokens, so only rank 0 records their sets."""

    rank: int

    def start_set_capture(self) -> None:
        """Record the sets of every later pass, for requests with KEEP_SET."""
        global _recorder
        _recorder = None if self.rank else SetRecorder()

    def sets_of_requests(
        self, wanted: Mapping[str, tuple[int, int]], ended: Sequence[str]
    ) -> dict[str, list[np.ndarray]]:
        """Call SetRecorder.take, and forget the requests `ended`; {} on ranks other than 0."""
        if _recorder is None:
            return {}
        taken = _recorder.take(wanted)
        _recorder.forget(ended)
        return taken

    def forget_sets(self, requests: Sequence[str]) -> None:
        """Call SetRecorder.forget."""
        if _recorder is not None:
            _recorder.forget(requests)


GPUModelRunner._sample = _sample
# CPUModelRunner inherits it.
GPUModelRunner._bookkeeping_sync = _bookkeeping_sync
TopKTopPSampler.forward_native = TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_cuda = _forward
