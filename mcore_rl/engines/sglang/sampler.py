"""Sampler for SGLang 0.5.23 with the noise of engines.noise (runs in SGLang's environment)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from mcore_rl.engines.sglang.sampled_rows import SampledRows, sample_rows
from mcore_rl.engines.sglang.set_capture import SetCapture

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    FromBatch = Callable[[ScheduleBatch, int], SamplingBatchInfo]


class SeededSampler(Sampler):
    """Samples after min-p, top-k and top-p truncation.

    The truncated probabilities are written to `probs`, because SGLang reports the logarithms of `probs`. Greedy rows,
    which SGLang represents by top-k 1, keep the untruncated probabilities. `sets` records the truncated sets.
    """

    def __init__(self, sets: SetCapture | None) -> None:
        super().__init__()
        self._sets = sets
        self._kept: torch.Tensor | None = None

    def forward(self, logits_output: LogitsProcessorOutput, *args: object, **kwargs: object) -> torch.Tensor:
        token_ids: torch.Tensor = super().forward(logits_output, *args, **kwargs)
        if self._sets is not None and self._kept is not None:
            self._sets.attach(logits_output, self._kept)
            self._kept = None
        return token_ids

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: SamplingBatchInfo, positions: torch.Tensor, simple_sampling_case: bool
    ) -> tuple[torch.Tensor, None]:
        rows = SampledRows(
            sampling_info.sampling_seed,
            # The position of the last token that was read. With data-parallel attention, padding follows.
            positions[: len(probs)] + 1,
            sampling_info.top_ks,
            sampling_info.top_ps,
            sampling_info.min_ps,
        )
        token_ids = sample_rows(probs, rows, truncate=not simple_sampling_case)
        if self._sets is not None and self._sets.is_needed:
            self._kept = probs > 0
        return token_ids, None


def with_seeds(original: FromBatch) -> FromBatch:
    """Wrap SamplingBatchInfo.from_schedule_batch, which fills its seeds only in deterministic mode."""

    def from_schedule_batch(batch: ScheduleBatch, vocab_size: int) -> SamplingBatchInfo:
        info = original(batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        # On the batch's device: SGLang indexes it with the rows that remain when a request ends.
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device, non_blocking=True)
        return info

    return from_schedule_batch


def install(runner: ModelRunner, sets: SetCapture | None) -> None:
    """Install the sampler in a model runner.

    register_sampler_backend does not work: on CPU SGLang overwrites the option that would select it.
    """
    SamplingBatchInfo.from_schedule_batch = with_seeds(SamplingBatchInfo.from_schedule_batch)
    runner.sampler = SeededSampler(sets)
