"""Number of threads of a process on a host without GPUs."""

from __future__ import annotations

import os
import sys

from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import Config

THREADS = "OMP_NUM_THREADS"
SMALL = 2 * 16e6
"""FLOPs per token below which a process computes with one thread. A second thread makes the demos' models (2 million
weights) no faster, and half as fast on a busy host; it makes a model with 100 million weights 1.7 times as fast."""


def shares_cores(config: Config) -> bool:
    """Return whether each process gets several threads; False if the user has set OMP_NUM_THREADS. Call it before Ray
    starts, which sets that variable."""
    if config.cluster.uses_cuda or THREADS in os.environ:
        return False
    # Inside the function: these modules import torch, and every process imports this module.
    from mcore_rl.resolved.costs import sequence_cost
    from mcore_rl.resolved.model import policy_config

    return sequence_cost(policy_config(ModelRole.policy(config.actor, config.model))[0]).per_token >= SMALL


def threads_per_process(peers: int) -> int:
    """Return the number of threads of each of `peers` processes that share the cores of this process equally."""
    return max(1, len(os.sched_getaffinity(0)) // peers)


def share_cores(peers: int) -> None:
    """Give this process and its children one of `peers` equal parts of the cores that it may run on. Call it before any
    computation."""
    threads = threads_per_process(peers)
    os.environ[THREADS] = str(threads)
    if (torch := sys.modules.get("torch")) is not None:  # it read the variable when it was imported
        torch.set_num_threads(threads)
