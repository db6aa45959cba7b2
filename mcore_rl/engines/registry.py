"""Registry of engines by the value of rollout.engine. An engine is imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

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
    engine: Callable[..., ReceivingEngine] = getattr(_module(name), _CLASSES[name])
    return engine


def follower(name: str) -> Callable[..., None]:
    """Return the function that runs an engine's ranks on a host other than its first: see engines.vllm.engine."""
    follow: Callable[..., None] = _module(name).follow
    return follow


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"mcore_rl.engines.{name}.engine")
