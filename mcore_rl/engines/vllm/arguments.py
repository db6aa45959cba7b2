"""Engine arguments and environment variables of vLLM, the same on all hosts of an engine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from mcore_rl.config.rules.quantization import check_capability
from mcore_rl.config.sampling import MTP, NO_DRAFTS
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.settings import EngineSettings
from mcore_rl.types import SamplingOptions
from mcore_rl.weights.engine_config import engine_overrides, has_vision_tower

if TYPE_CHECKING:
    from transformers import PretrainedConfig


CPU_ATTENTION = "CPU_MLA"
"""Affects latent attention only. The AMX kernels require bfloat16 and drop kv_b_proj, which a reload needs."""


def set_environment(timeout_seconds: float) -> None:
    """Set the environment variables that vLLM reads on import. Values set by the user are kept.

    The engine core runs in this process, without a queue in between. OpenMP threads are not bound to cores, because
    engine and trainer ranks share the cores. `timeout_seconds`: time limit of a step.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # v1: `sampler` replaces its functions
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(math.ceil(timeout_seconds)))
    if not torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def engine_arguments(settings: EngineSettings) -> dict[str, object]:
    """Return the EngineArgs.

    Raises: ConfigError for a GPU that does not support rollout.quantization.
    """
    config = settings.rollout_config
    overrides = engine_overrides(
        settings.model_dir,
        load_weights=settings.load_weights,
        key=settings.names.checkpoint,
        quantization=config.quantization,
        group=config.quantization_group,
    )
    if settings.float32_head:
        overrides["head_dtype"] = "float32"  # read by ModelConfig.head_dtype; vLLM has no argument for it
    arguments: dict[str, object] = {
        "model": str(settings.model_dir),
        "dtype": settings.dtype,
        "seed": settings.seed,
        # "auto" prefers consolidated*.safetensors, if present, to the files in the index. "dummy" weights are random.
        "load_format": "hf" if settings.load_weights else "dummy",
        "hf_overrides": overrides,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # ignore sampling defaults in the model directory
        "max_model_len": config.max_prompt_tokens + config.max_response_tokens,
        "max_num_seqs": config.max_concurrent_requests,
        "tensor_parallel_size": config.tp,
        "distributed_executor_backend": "mp" if config.tp > 1 else "uni",
        "enable_expert_parallel": config.expert_parallel,
        # The default, raw_logprobs, are log-probabilities before the temperature is applied.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "mcore_rl.engines.vllm.worker_extension.WeightReceiverExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # With asynchronous scheduling a step would return the tokens of the previous one.
        "async_scheduling": False,
    }
    if config.draft != NO_DRAFTS:
        arguments["speculative_config"] = _draft_arguments(config)
    if config.draft == MTP:
        arguments["hf_overrides"] = partial(override_config, overrides)
    return arguments | _optional_arguments(settings) | _device_arguments(settings)


def _optional_arguments(settings: EngineSettings) -> dict[str, object]:
    """Return the EngineArgs of parts that not every engine has: routers in float32, several hosts, a limit of tokens
    per pass, images."""
    config, hosts, arguments = settings.rollout_config, settings.hosts, dict[str, object]()
    if settings.float32_router:
        from mcore_rl.engines.vllm.routers import ADDITIONAL_CONFIG

        arguments["additional_config"] = ADDITIONAL_CONFIG
    if hosts.num > 1:
        arguments |= {
            "nnodes": hosts.num,
            "node_rank": hosts.index,
            "master_addr": hosts.address,
            "master_port": hosts.port,
        }
    if config.max_batched_tokens is not None:
        # A prompt that exceeds the remaining tokens of a pass is computed in pieces.
        arguments |= {"max_num_batched_tokens": config.max_batched_tokens, "enable_chunked_prefill": True}
    if has_vision_tower(settings.model_dir):
        # vLLM measures the largest image with the model's processor, which needs the tokenizer. Requests carry images
        # that are processed and normalized already.
        arguments |= {
            "skip_tokenizer_init": False,
            "limit_mm_per_prompt": {"image": 1, "video": 0},
            "mm_processor_cache_gb": 0,
            "mm_device_do_normalize": False,
            "mm_encoder_tp_mode": "data",  # every rank has the whole tower, as the trainer sends it
        }
    return arguments


def _device_arguments(settings: EngineSettings) -> dict[str, object]:
    """Return the EngineArgs that depend on the device.

    Raises: ConfigError for a GPU that does not support rollout.quantization.
    """
    config = settings.rollout_config
    if torch.cuda.is_available():
        check_capability(config, torch.cuda.get_device_capability())
        return {
            "gpu_memory_utilization": config.gpu_memory_fraction,
            "enforce_eager": config.enforce_eager,
            "enable_sleep_mode": True,
            "enable_return_routed_experts": settings.capture_routing,
        }
    from mcore_rl.engines.vllm.cpu import IR_OP_PRIORITY

    return {
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
        "enforce_eager": True,
        "ir_op_priority": IR_OP_PRIORITY,
        # With vLLM's default of 128, short sequences are spread over more memory than the CPU caches hold.
        "block_size": 32,
        "attention_backend": CPU_ATTENTION,
    }


def override_config(overrides: Mapping[str, object], config: PretrainedConfig) -> PretrainedConfig:
    """Override fields of config.json for target and drafter. vLLM applies a dictionary to the target only.

    The drafter keeps its own `architectures`, which vLLM has set before.
    """
    drafts = config.model_type.endswith("_mtp")
    config.update({key: value for key, value in overrides.items() if not (drafts and key == "architectures")})
    return config


def _draft_arguments(config: RolloutConfig) -> dict[str, object]:
    """Return the speculative_config. After a pass of at least rollout.draft_below requests, none gets a draft."""
    most = max(config.draft_below, config.max_concurrent_requests)
    if config.draft == MTP:
        # The drafter runs after the bookkeeping of a pass, on the accepted tokens only.
        drafter: dict[str, object] = {"method": "mtp", "disable_padded_drafter_batch": True}
        if not torch.cuda.is_available():
            drafter["attention_backend"] = CPU_ATTENTION  # not inherited from the target
    else:
        drafter = {"method": "custom_class", "model": "mcore_rl.engines.vllm.drafts.NgramProposer"}
    return {
        **drafter,
        "num_speculative_tokens": config.draft_tokens,
        "num_speculative_tokens_per_batch_size": [
            (1, config.draft_below - 1, config.draft_tokens),
            (config.draft_below, most, 0),
        ],
    }


def sampling_arguments(options: SamplingOptions, eos_token_ids: Sequence[int]) -> dict[str, object]:
    """Return the arguments of vLLM's SamplingParams."""
    sampling: dict[str, object] = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "max_tokens": options.max_response_tokens,
        "stop_token_ids": list(eos_token_ids),
        "logprobs": 0,  # of the sampled token only
        "detokenize": False,
    }
    # vLLM ignores extra_args; engines.vllm.sampler.KEEP_SET reads them. A greedy token has no distribution.
    return sampling | ({"extra_args": {"keep_set": True}} if options.keeps_sets else {})
