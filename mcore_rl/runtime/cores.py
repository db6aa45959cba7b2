"""How many threads a process computes with on a host without GPUs."""

from __future__ import annotations

import os
import sys

from mcore_rl.config.roles import ModelRole
from mcore_rl.config.rules.defaults import uses_cuda
from mcore_rl.config.schema import Config
from mcore_rl.resolved.costs import sequence_cost
from mcore_rl.resolved.model import policy_config

THREADS = "OMP_NUM_THREADS"
SMALL = 2 * 16e6
"""FLOPs per token: with two threads the demos' models (2 million weights) are no faster, and half as fast where
anything else runs; one of 100 million is 1.7 times as fast."""


def shares_cores(config: Config) -> bool:
    """Whether processes get more than a thread each. Not where the user's shell says how many all of them have: to be
    asked before Ray starts."""
    if uses_cuda(config.cluster) or THREADS in os.environ:
        return False
    return sequence_cost(policy_config(ModelRole.policy(config))[0]).per_token >= SMALL


def share_cores(peers: int) -> None:
    """From now on this process, and those that it starts, compute with one of `peers` equal parts of the cores that it
    may run on. To be called before anything is computed."""
    threads = max(1, len(os.sched_getaffinity(0)) // peers)
    os.environ[THREADS] = str(threads)
    if (torch := sys.modules.get("torch")) is not None:  # it has looked there when it was imported
        torch.set_num_threads(threads)
