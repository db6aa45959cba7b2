"""Ranks of an SGLang engine on a host other than its first. They receive commands from the first host."""

from __future__ import annotations

import time
from pathlib import Path

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.hosts import EngineHosts
from mcore_rl.engines.sglang.processes import start_rank
from mcore_rl.processes.child import kill_all


def follow(
    model_dir: str | Path, config: RolloutConfig, hosts: EngineHosts, *, dtype: str, seed: int, timeout_seconds: float
) -> None:
    """See engines.vllm.follower.follow. The ranks receive their settings from the first host."""
    address = f"{hosts.address}:{hosts.commands_port}"
    ranks = [start_rank(rank, config.tp, address, hosts.key) for rank in hosts.ranks(config.tp)]
    try:
        while all(rank.exit_code is None for rank in ranks):
            time.sleep(0.2)
    finally:
        kill_all(ranks)
