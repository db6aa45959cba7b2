"""Reward managers for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.manager import RewardManager


@contextmanager
def running_manager(config: RewardConfig, max_response_tokens: int = 10) -> Iterator[RewardManager]:
    """Yield a manager and shut it down at the end."""
    manager = RewardManager(config, max_response_tokens=max_response_tokens)
    try:
        yield manager
    finally:
        manager.shutdown()
