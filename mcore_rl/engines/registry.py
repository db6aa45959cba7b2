"""Registry of engines by the value of rollout.engine. An engine is imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

from mcore_rl.engines.rank_engine import RankEngine
from mcore_rl.engines.settings import EngineSettings

_CLASSES = {"vllm": "VllmEngine", "sglang": "SglangEngine"}


def engine_class(name: str) -> Callable[[EngineSettings], RankEngine]:
    """Return the class of an engine."""
    engine: Callable[[EngineSettings], RankEngine] = getattr(_module(name), _CLASSES[name])
    return engine


def follower(name: str) -> Callable[[EngineSettings], None]:
    """Return the function that runs an engine's ranks on a host other than its first: see engines.vllm.engine."""
    follow: Callable[[EngineSettings], None] = _module(name).follow
    return follow


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"mcore_rl.engines.{name}.engine")
