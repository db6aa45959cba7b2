"""Verification of drafts in vLLM 0.32 by equality with the sample of engines.noise (see engines.drafts).

Importing this module replaces vLLM's functions, on every engine rank. vLLM's own rejection sampler draws from a random
generator per request, so its responses depend on the drafts; on CPU it reads temperatures from uninitialised memory and
returns noise at temperatures above 0.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from mcore_rl.engines.drafts import accept_drafts, continue_ngram, row_requests


def _verify(
    self: RejectionSampler,
    metadata: SpecDecodeMetadata,
    draft_probs: torch.Tensor | None,
    logits: torch.Tensor,
    sampling_metadata: SamplingMetadata,
) -> SamplerOutput:
    """Replace RejectionSampler.forward. Every row is sampled by the sampler that samples without drafts.

    Shapes: logits [rows, V] -> sampled_token_ids [requests, max_spec_len + 1], with -1 after the accepted tokens.
    """
    counts = metadata.num_draft_tokens
    if metadata.max_spec_len:
        sampling_metadata = _by_row(sampling_metadata, metadata, logits.device)
    sampled: SamplerOutput = self.sampler(logits=logits, sampling_metadata=sampling_metadata)
    tokens, rows = accept_drafts(sampled.sampled_token_ids[:, 0], metadata.draft_token_ids, counts)
    logp = sampled.logprobs_tensors
    if logp is not None:
        rows = rows.flatten()
        logp = LogprobsTensors(logp.logprob_token_ids[rows], logp.logprobs[rows], logp.selected_token_ranks[rows])
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logp)


def _by_row(metadata: SamplingMetadata, drafts: SpecDecodeMetadata, device: torch.device) -> SamplingMetadata:
    """Repeat the sampling options of each request for each of its rows. Options that requests of this project never
    have are left as they are: see arguments.sampling_arguments."""
    requests, places = row_requests(drafts.num_draft_tokens)
    index = torch.from_numpy(requests).to(device, non_blocking=True)
    names = ["temperature", "top_p", "top_k"]
    changes: dict[str, object] = {}
    if not metadata.no_penalties:
        names += ["prompt_token_ids", "frequency_penalties", "presence_penalties", "repetition_penalties"]
        # A row is valid if the draft tokens before it are accepted, and the penalty then applies to them too.
        tokens, ends = drafts.draft_token_ids.tolist(), np.cumsum(drafts.num_draft_tokens)
        starts = ends - drafts.num_draft_tokens
        changes["output_token_ids"] = [
            metadata.output_token_ids[request] + tokens[starts[request] : starts[request] + place]
            for request, place in zip(requests, places, strict=True)
        ]
    for name in names:
        options: torch.Tensor | None = getattr(metadata, name)
        changes[name] = None if options is None else options[index]
    changes["logitsprocs"] = LogitsProcessors(
        _min_p_by_row(each, index) for each in metadata.logitsprocs.all if isinstance(each, MinPLogitsProcessor)
    )
    return replace(metadata, **changes, generators={}, spec_token_ids=None)


def _min_p_by_row(processor: MinPLogitsProcessor, index: torch.Tensor) -> MinPLogitsProcessor:
    by_row = copy(processor)
    if processor.min_p_count:
        by_row.min_p = processor.min_p[index]
    return by_row


_upstream_processors = gpu_model_runner.build_logitsprocs


def _build_logitsprocs(
    vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool, *args: object
) -> LogitsProcessors:
    """Wrap build_logitsprocs to add min-p, which vLLM leaves out with drafts."""
    built: LogitsProcessors = _upstream_processors(vllm_config, device, is_pin_memory, *args)
    if vllm_config.speculative_config is not None:
        built.argmax_invariant.append(MinPLogitsProcessor(vllm_config, device, is_pin_memory))
    return built


class NgramProposer:
    """Proposer of vLLM's method `custom_class`. vLLM's own search for n-grams is compiled in the first pass that drafts
    (30 seconds on a CPU), and the package that compiles it prevents the start of another engine in the same process.

    Drafts follow the schedule of arguments.engine_arguments: none after a pass with more requests than its first entry.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._max_length = vllm_config.model_config.max_model_len
        (_, self._most_requests, self._num_tokens), _ = (
            vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        )

    def load_model(self, target: torch.nn.Module) -> None:
        """Do nothing: there is no draft model."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return a draft for each request of a pass.

        sampled_token_ids: new tokens by request; a request whose prompt is incomplete has none and gets no draft.
        Shapes: num_tokens_no_spec [requests], token_ids_cpu [requests, tokens], both with unused rows.
        """
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            room = min(self._num_tokens, self._max_length - length)
            if not sampled or room <= 0 or len(sampled_token_ids) > self._most_requests:
                drafts.append([])
            else:
                drafts.append(continue_ngram(token_ids_cpu[row, :length], room).tolist())
        return drafts


def _input_fits_in_drafter(self: GPUModelRunner, common_attn_metadata: object) -> bool:
    """Replace GPUModelRunner._input_fits_in_drafter. NgramProposer limits the draft of each request; the scheduler
    drops draft tokens of multi-token-prediction layers beyond max_model_len.

    If one request is near max_model_len, vLLM gives drafts of token 0 to all requests, also in full batches.
    """
    return True


RejectionSampler.forward = _verify
# CPUModelRunner inherits it.
GPUModelRunner._input_fits_in_drafter = _input_fits_in_drafter
gpu_model_runner.build_logitsprocs = _build_logitsprocs
