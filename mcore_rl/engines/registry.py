"""Registry of engines by the value of rollout.engine. An engine is imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.hosts import EngineHosts
from mcore_rl.ports import Engine, WeightReceiver
from mcore_rl.weights.connection import Connection
from mcore_rl.weights.transports.topology import Endpoint
from mcore_rl.weights.verify import Comparison

Receiver = WeightReceiver[Endpoint, Connection, Comparison]
_CLASSES = {"vllm": "VllmEngine", "sglang": "SglangEngine"}


class ReceivingEngine(Engine, Protocol):
    """Engine that receives weight updates."""

    @property
    def receiver(self) -> Receiver: ...


def engine_class(name: str) -> Callable[..., ReceivingEngine]:
    """Return the engine's class. Its constructor has the arguments of VllmEngine."""
    module = importlib.import_module(f"mcore_rl.engines.{name}.engine")
    engine: Callable[..., ReceivingEngine] = getattr(module, _CLASSES[name])
    return engine


def follow(
    name: str,
    model_dir: str | Path,
    config: RolloutConfig,
    hosts: EngineHosts,
    *,
    dtype: str,
    seed: int,
    timeout_seconds: float,
) -> None:
    """Run the ranks of an engine on a host other than its first. Returns when one of them has ended."""
    follower = importlib.import_module(f"mcore_rl.engines.{name}.follower")
    follower.follow(model_dir, config, hosts, dtype=dtype, seed=seed, timeout_seconds=timeout_seconds)
