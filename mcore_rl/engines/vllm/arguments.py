"""What vLLM is told when an engine starts, the same on all of its hosts."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.hosts import EngineHosts
from mcore_rl.weights.engine_config import engine_overrides


def set_environment(timeout_seconds: float) -> None:
    """Settings that vLLM reads when it is imported; a value that the user has set stays. A step has `timeout_seconds`.

    The engine core runs in this process (no queue between it and us); OpenMP threads are not bound to cores, since
    engine and trainer ranks share them.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the one that draws by our sampler
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(math.ceil(timeout_seconds)))
    if not torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def model_arguments(model_dir: str | Path, *, dtype: str, seed: int, load_weights: bool) -> dict[str, Any]:
    """EngineArgs of the model; load_weights False: random weights."""
    arguments: dict[str, Any] = {"model": str(model_dir), "dtype": dtype, "seed": seed}
    # "auto" would read consolidated*.safetensors, where there are some, in the place of what the index lists.
    arguments["load_format"] = "hf" if load_weights else "dummy"
    arguments["hf_overrides"] = engine_overrides(model_dir, load_weights=load_weights)
    return arguments


def ray_arguments() -> dict[str, Any]:
    """EngineArgs of an engine whose ranks pull their weights (weights.transport=vllm_rdt); its process is an actor of
    Ray's."""
    from vllm.config import WeightTransferConfig

    from mcore_rl.engines.vllm.ray_ranks import RayRanks

    return {
        "distributed_executor_backend": RayRanks,
        "weight_transfer_config": WeightTransferConfig(backend="sharded_rdt"),
    }


def engine_arguments(config: RolloutConfig, hosts: EngineHosts) -> dict[str, Any]:
    """EngineArgs of everything else."""
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # nothing of the model directory's own sampling defaults
        "max_model_len": config.max_prompt_tokens + config.max_response_tokens,
        "max_num_seqs": config.max_concurrent_requests,
        "tensor_parallel_size": config.tp,
        "distributed_executor_backend": "mp" if config.tp > 1 else "uni",
        "enable_expert_parallel": config.expert_parallel,
        # The default, raw_logprobs, ignores the temperature.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "mcore_rl.engines.vllm.worker_extension.WeightReceiverExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
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
        # A prompt longer than what is left of a pass is computed in pieces.
        arguments |= {"max_num_batched_tokens": config.max_batched_tokens, "enable_chunked_prefill": True}
    if torch.cuda.is_available():
        arguments |= {
            "gpu_memory_utilization": config.gpu_memory_fraction,
            "enforce_eager": config.enforce_eager,
            "enable_sleep_mode": True,
        }
    else:
        from mcore_rl.engines.vllm.cpu import IR_OP_PRIORITY

        arguments |= {
            "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
            "enforce_eager": True,
            "ir_op_priority": IR_OP_PRIORITY,
            # vLLM's default of 128 spreads short sequences over memory that no cache holds.
            "block_size": 32,
            # Of latent attention alone. Its AMX kernels want bfloat16 and drop kv_b_proj, which a reload needs.
            "attention_backend": "CPU_MLA",
        }
    return arguments
