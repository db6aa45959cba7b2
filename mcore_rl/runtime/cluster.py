"""Starts or joins a Ray cluster and guarantees that nothing is left running."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import ray

from mcore_rl.config.schema import ClusterConfig, Config
from mcore_rl.config.validation import num_trainer_ranks
from mcore_rl.runtime.health import forget_signals, interrupt

# One OpenMP thread per process: ranks and engines share the cores, and two threads each once cost 100 times the work.
PROCESS_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # A step's activations stay with the process: faulting them in anew costs more than the passes that fill them.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 28),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 29),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def uses_cuda(cluster: ClusterConfig) -> bool:
    """Whether ranks and engines run on GPUs."""
    if cluster.device != "auto":
        return cluster.device == "cuda"
    import torch

    return torch.cuda.is_available()


@contextlib.contextmanager
def ray_cluster(config: Config) -> Iterator[None]:
    """A Ray cluster for the length of the block: joined at cluster.address, else started on this machine.

    A cluster started here ends with the block, and also when this process is killed (Ray's own reaper watches it).
    SIGTERM becomes KeyboardInterrupt, so that a stopped job unwinds like Ctrl-C; neither gets lost (health.interrupt).
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    forget_signals()
    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    for name, value in PROCESS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # a local cluster's processes inherit it; no runtime-env agent needed
    try:
        if config.cluster.address is not None:
            ray.init(
                address=config.cluster.address,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": PROCESS_ENVIRONMENT},
            )
        else:
            ray.init(
                address="local",
                num_cpus=_processes(config),
                include_dashboard=False,
                object_store_memory=int(config.cluster.object_store_gib * 2**30),
                log_to_driver=False,
                logging_level="ERROR",
            )
        for number in previous:
            signal.signal(number, interrupt)  # again: ray.init put its own in place, which ends the process
        yield
    finally:
        ray.shutdown()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _processes(config: Config) -> int:
    return num_trainer_ranks(config) + config.rollout.num_engines * config.rollout.tp + 1
