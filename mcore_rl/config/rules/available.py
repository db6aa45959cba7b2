"""What a configuration may ask for and this version cannot run yet."""

from __future__ import annotations

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.schema import Config


def unavailable_engine(config: Config) -> str | None:
    """What to set where responses are sampled by an engine that is not there."""
    if is_supervised(config.algorithm) or config.rollout.engine == "vllm":
        return None
    return f"rollout.engine={config.rollout.engine} is not available; set rollout.engine=vllm"


def cannot_run(config: Config) -> list[str]:
    """What this version lacks for the configuration to run, each beginning with its key; [] where it lacks nothing."""
    engine = unavailable_engine(config)
    return [] if engine is None else [engine]
