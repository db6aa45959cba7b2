"""Sampler for SGLang 0.5.23 with the noise of engines.noise (runs in SGLang's environment)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from mcore_rl.engines.noise import noise_keys, sample_tokens

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    FromBatch = Callable[[ScheduleBatch, int], SamplingBatchInfo]


class SeededSampler(Sampler):
    """Samples after min-p, top-k and top-p truncation.

    The truncated probabilities are written to `probs`, because SGLang reports the logarithms of `probs`. Greedy rows,
    which SGLang represents by top-k 1, keep the untruncated probabilities.
    """

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: SamplingBatchInfo, positions: torch.Tensor, simple_sampling_case: bool
    ) -> tuple[torch.Tensor, None]:
        greedy = sampling_info.top_ks == 1
        if not simple_sampling_case:
            kept = _truncated(probs, sampling_info)
            probs.copy_(torch.where(greedy[:, None], probs, kept / kept.sum(-1, keepdim=True)))
        # SGLang's position is the last token that was read; noise_keys needs the position of the token to sample.
        keys = noise_keys(sampling_info.sampling_seed.tolist(), (positions.cpu().numpy() + 1).astype(np.int64))
        sampled = sample_tokens(probs, keys.to(probs.device, non_blocking=True))
        return torch.where(greedy, probs.argmax(-1), sampled).to(torch.int32), None


def _truncated(probs: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """Zero the probabilities of tokens below min-p, then outside top-k, then outside top-p of the rest, in the order of
    vLLM."""
    ordered, index = probs.sort(dim=-1, descending=True)
    ordered = ordered.masked_fill(ordered < ordered[:, :1] * info.min_ps[:, None], 0.0)
    rank = torch.arange(probs.shape[1], device=probs.device)
    ordered = ordered.masked_fill(rank[None] >= info.top_ks[:, None], 0.0)
    share = ordered / ordered.sum(-1, keepdim=True)
    # The mass of the tokens before each one: the token that crosses top_p is kept.
    ordered = ordered.masked_fill(share.cumsum(-1) - share >= info.top_ps[:, None], 0.0)
    return torch.zeros_like(probs).scatter_(-1, index, ordered)


def with_seeds(original: FromBatch) -> FromBatch:
    """Wrap SamplingBatchInfo.from_schedule_batch, which fills its seeds only in deterministic mode."""

    def from_schedule_batch(batch: ScheduleBatch, vocab_size: int) -> SamplingBatchInfo:
        info = original(batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
        return info

    return from_schedule_batch


def install(runner: ModelRunner) -> None:
    """Install the sampler in a model runner.

    register_sampler_backend does not work: on CPU SGLang overwrites the option that would select it.
    """
    SamplingBatchInfo.from_schedule_batch = with_seeds(SamplingBatchInfo.from_schedule_batch)
    runner.sampler = SeededSampler()
