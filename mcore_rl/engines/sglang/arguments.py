"""Arguments of SGLang, by device. Server arguments are fields of ServerArgs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.settings import EngineSettings
from mcore_rl.engines.sglang.layout_arguments import layout_arguments
from mcore_rl.errors import ConfigError
from mcore_rl.types import GenerationRequest
from mcore_rl.weights.engine_config import engine_layout, engine_overrides

SPARE_TOKENS = 6
"""Tokens added to SGLang's context length. It truncates responses two tokens before the end of the context, and rejects
prompts (including a partial response) that reach into its last six tokens (tp_worker.py, scheduler.py)."""


def server_arguments(settings: EngineSettings, device: str) -> dict[str, object]:
    """Return the server arguments of all ranks. `device`: cpu or cuda."""
    config = settings.rollout_config
    arguments: dict[str, object] = {
        "model_path": str(settings.model_dir),
        "json_model_override_args": json.dumps(
            engine_overrides(settings.model_dir, load_weights=settings.load_weights, key=settings.names.checkpoint)
        ),
        "device": device,
        "dtype": settings.dtype,
        "load_format": "auto" if settings.load_weights else "dummy",
        "skip_tokenizer_init": True,
        "disable_overlap_schedule": not config.overlap_schedule,
        "context_length": config.max_prompt_tokens + config.max_response_tokens + SPARE_TOKENS,
        "max_running_requests": config.max_concurrent_requests,
        "random_seed": settings.seed,
        "log_level": "error",
        "enable_return_routed_experts": settings.capture_routing,
        "enable_fp32_lm_head": settings.float32_head,
    }
    if config.max_batched_tokens is not None:
        arguments["chunked_prefill_size"] = config.max_batched_tokens
    arguments |= layout_arguments(engine_layout(config), settings.hosts.num, cuda=device == "cuda")
    return arguments | (_on_cpu() if device == "cpu" else _on_cuda(config))


def _on_cpu() -> dict[str, object]:
    return {
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,  # only an upper bound of max_total_tokens
    }


def _on_cuda(config: RolloutConfig) -> dict[str, object]:
    # The ranks set mem_fraction_static when they know how much memory is free: see static_fraction.
    arguments: dict[str, object] = {
        "enable_memory_saver": True,
        "sampling_backend": "pytorch",  # its sampler is replaced; flashinfer's rejects seeds
        # Decoding takes most of the time. Graphs of prefills would make the start longer and take memory.
        "disable_prefill_cuda_graph": True,
    }
    return arguments | ({"disable_cuda_graph": True} if config.enforce_eager else {})


def static_fraction(free_bytes: int, total_bytes: int, memory_fraction: float, key: str) -> float:
    """Return SGLang's mem_fraction_static for an engine that may use `memory_fraction` of a GPU's memory.

    SGLang takes a fraction of the memory that is free when it starts, for weights and KV cache. It leaves
    total_bytes * (1 - memory_fraction) free.
    key: key of `memory_fraction`, for messages.
    Raises: ConfigError unless the result is between 0 and 1.
    """
    kept_free = total_bytes * (1 - memory_fraction)
    if not kept_free:
        raise ConfigError(
            f"{key}=1 leaves SGLang no memory for activations and CUDA graphs, which it does not count as its own; set "
            "it to at most 0.95"
        )
    if free_bytes <= kept_free:
        raise ConfigError(
            f"{key}={memory_fraction:g} leaves {kept_free / 2**30:.1f} GiB of a GPU to other processes, but only "
            f"{free_bytes / 2**30:.1f} GiB are free when SGLang starts; raise it, or free memory of the GPU"
        )
    return 1 - kept_free / free_bytes


def sampling_arguments(request: GenerationRequest, num_sampled: int, eos_token_ids: Sequence[int]) -> dict[str, object]:
    """Return the arguments of SGLang's SamplingParams for the rest of a response with `num_sampled` tokens."""
    sampling, stops = request.sampling, list(eos_token_ids)
    return {
        "max_new_tokens": sampling.max_response_tokens - num_sampled,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": stops,
        "ignore_eos": not stops,
        "sampling_seed": request.seed,
    }
