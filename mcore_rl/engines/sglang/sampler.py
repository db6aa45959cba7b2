"""SGLang 0.5.23's sampler, drawing as engines.noise says (in SGLang's environment)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from mcore_rl.engines.noise import draw_tokens, places


class SeededSampler(Sampler):
    """Draws from what top-p and top-k leave, and leaves in `probs` the probabilities that it drew from: SGLang reports
    their logarithms. Greedy rows, which SGLang asks for as top-k 1, keep all of theirs."""

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool
    ) -> tuple[torch.Tensor, None]:
        greedy = sampling_info.top_ks == 1
        if not simple_sampling_case:
            kept = _truncated(probs, sampling_info)
            probs.copy_(torch.where(greedy[:, None], probs, kept / kept.sum(-1, keepdim=True)))
        # SGLang counts the place of the token that was read, we that of the one to be drawn.
        at = places(sampling_info.sampling_seed.tolist(), (positions.cpu().numpy() + 1).astype(np.int64))
        drawn = draw_tokens(probs, at.to(probs.device, non_blocking=True))
        return torch.where(greedy, probs.argmax(-1), drawn).to(torch.int32), None


def _truncated(probs: torch.Tensor, info: Any) -> torch.Tensor:
    """`probs`, zero where top-k leaves a token out, or top-p, of what top-k leaves."""
    ordered, index = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    ordered = ordered.masked_fill(rank[None] >= info.top_ks[:, None], 0.0)
    share = ordered / ordered.sum(-1, keepdim=True)
    ordered = ordered.masked_fill(share.cumsum(-1) - share >= info.top_ps[:, None], 0.0)
    return torch.zeros_like(probs).scatter_(-1, index, ordered)


def with_seeds(original: Callable[..., Any]) -> Callable[..., Any]:
    """SamplingBatchInfo.from_schedule_batch, which carries seeds along but fills them in deterministic mode only."""

    def from_schedule_batch(batch: Any, vocab_size: int) -> Any:
        info = original(batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
        return info

    return from_schedule_batch


def install(runner: Any) -> None:
    """Into a model runner. Not register_sampler_backend: on CPU the option that would choose it is overwritten."""
    SamplingBatchInfo.from_schedule_batch = with_seeds(SamplingBatchInfo.from_schedule_batch)
    runner.sampler = SeededSampler()
