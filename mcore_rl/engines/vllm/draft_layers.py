"""Drafts of multi-token-prediction layers in vLLM 0.32. Importing this module replaces vLLM's proposer.

vLLM runs the layers as a second model, the drafter, with its own weight loader. It shares the embedding and the output
layer of the model whose tokens it predicts, the target. Draft tokens are sampled with the noise of the sampler. If the
drafter computes the same probabilities as the target, verification accepts its token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import _SAMPLING_EPS
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker import gpu_model_runner

from mcore_rl.engines.noise import noise_keys, sample_tokens
from mcore_rl.engines.vllm.sampler import request_seeds

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_TARGET, _DRAFTER = "target.", "drafter."


class NoiseProposer(EagleProposer):
    """Proposer of the drafter.

    It runs after every pass, also if the schedule of arguments.engine_arguments asks for drafts of 0 tokens: the
    drafter's KV cache is complete when drafts begin again.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: GPUModelRunner) -> None:
        super().__init__(vllm_config, device, runner)
        self._runner = runner
        self._place = 0
        """Number of draft tokens that this pass has sampled for each request."""

    def propose(self, *, common_attn_metadata: CommonAttentionMetadata, **kwargs: object) -> torch.Tensor:
        self._place = 0
        # On CPU both lengths are one tensor, and every draft token would add 2 to it.
        bound = common_attn_metadata.seq_lens_cpu_upper_bound
        if bound is not None:
            common_attn_metadata = replace(common_attn_metadata, seq_lens_cpu_upper_bound=bound.clone())
        return super().propose(common_attn_metadata=common_attn_metadata, **kwargs)

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, None]:
        """Sample the next draft token of each request, with its temperature and without truncation or penalties.

        Shapes: hidden_states [requests, H] -> [requests].
        """
        logits = self.model.compute_logits(hidden_states)
        likeliest = logits.argmax(-1)
        place, self._place = self._place, self._place + 1
        temperature = sampling_metadata.temperature
        if temperature is None:
            return likeliest, None
        batch = self._runner.input_batch
        # The drafter runs after the bookkeeping of the pass, which has counted the sampled tokens.
        positions = batch.num_tokens_no_spec[: batch.num_reqs] + place
        keys = noise_keys(request_seeds(batch), positions).to(logits.device, non_blocking=True)
        greedy = temperature < _SAMPLING_EPS
        scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
        return torch.where(greedy, likeliest, sample_tokens(scaled.softmax(-1), keys)), None


class WithDrafter(torch.nn.Module):
    """Target and drafter as one model, so that an update and a certificate contain the weights of both."""

    def __init__(self, target: torch.nn.Module, drafter: torch.nn.Module) -> None:
        super().__init__()
        self.target, self.drafter = target, drafter

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load HF tensors by name. Both models receive all tensors, and ignore tensors of the other model."""
        given = list(weights)
        for model in (self.target, self.drafter):
            model.load_weights(iter(given))


_INSIDE_VISION_MODELS = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "visual.": "model.visual.",
}
"""Names of modules of models with a vision tower -> names in checkpoints."""


def hf_name(name: str) -> str:
    """Return the HF name of a parameter of WithDrafter, without the names of modules that only vLLM has."""
    if name.startswith(_DRAFTER):
        return name.removeprefix(_DRAFTER).replace(".mtp_block.", ".")
    name = name.removeprefix(_TARGET)
    for own, of_checkpoint in _INSIDE_VISION_MODELS.items():
        if name.startswith(own):
            return of_checkpoint + name.removeprefix(own)
    return name


# CPUModelRunner inherits the constructor that creates it.
gpu_model_runner.EagleProposer = NoiseProposer
