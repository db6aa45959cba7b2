"""Engine arguments and environment variables of vLLM, the same on all hosts of an engine."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from mcore_rl.engines.settings import EngineSettings
from mcore_rl.types import SamplingOptions
from mcore_rl.weights.engine_config import engine_overrides


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
    """Return the EngineArgs."""
    config, hosts = settings.rollout_config, settings.hosts
    arguments: dict[str, object] = {
        "model": str(settings.model_dir),
        "dtype": settings.dtype,
        "seed": settings.seed,
        # "auto" prefers consolidated*.safetensors, if present, to the files in the index. "dummy" weights are random.
        "load_format": "hf" if settings.load_weights else "dummy",
        "hf_overrides": engine_overrides(
            settings.model_dir, load_weights=settings.load_weights, key=settings.names.checkpoint
        ),
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
    if torch.cuda.is_available():
        arguments |= {
            "gpu_memory_utilization": config.gpu_memory_fraction,
            "enforce_eager": config.enforce_eager,
            "enable_sleep_mode": True,
            "enable_return_routed_experts": settings.capture_routing,
        }
    else:
        from mcore_rl.engines.vllm.cpu import IR_OP_PRIORITY

        arguments |= {
            "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
            "enforce_eager": True,
            "ir_op_priority": IR_OP_PRIORITY,
            # With vLLM's default of 128, short sequences are spread over more memory than the CPU caches hold.
            "block_size": 32,
            # Affects latent attention only. The AMX kernels require bfloat16 and drop kv_b_proj, which a reload needs.
            "attention_backend": "CPU_MLA",
        }
    return arguments


def sampling_arguments(options: SamplingOptions, eos_token_ids: Sequence[int]) -> dict[str, object]:
    """Return the arguments of vLLM's SamplingParams."""
    return {
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
