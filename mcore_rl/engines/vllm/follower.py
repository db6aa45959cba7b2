"""Ranks of a vLLM engine on a host other than its first. The scheduler on the first host controls them."""

from __future__ import annotations

from pathlib import Path

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.hosts import EngineHosts
from mcore_rl.engines.vllm.arguments import engine_arguments, model_arguments, set_environment


def follow(
    model_dir: str | Path, config: RolloutConfig, hosts: EngineHosts, *, dtype: str, seed: int, timeout_seconds: float
) -> None:
    """Run this host's ranks. Returns when one of them has ended.

    The end of the first host's process is not detected here: the caller must terminate this process then.
    """
    set_environment(timeout_seconds)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    arguments = engine_arguments(config, hosts) | model_arguments(model_dir, dtype=dtype, seed=seed, load_weights=False)
    vllm_config = EngineArgs(**arguments).create_engine_config(headless=True)
    executor = MultiprocExecutor(vllm_config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)
