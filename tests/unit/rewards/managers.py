"""Helpers for tests that grade responses, in this process or with a RewardManager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.rewards.functions import Sample
from mcore_rl.rewards.graders.loading import load_grader
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.types import Prompt, Score


def graded_here(config: RewardConfig, response: str, truth: object = "5", source: str = "aime25") -> Score:
    """Grade a response in this process."""
    (score,) = load_grader(config, SandboxConfig()).grade([Sample(source, response, truth, {})])
    return score


@contextmanager
def running_manager(config: RewardConfig, max_response_tokens: int = 10) -> Iterator[RewardManager]:
    """Yield a manager and shut it down at the end."""
    manager = RewardManager(config, max_response_tokens=max_response_tokens)
    try:
        yield manager
    finally:
        manager.shutdown()


def prompt(truth: object = "0", **extra: object) -> Prompt:
    return Prompt(0, np.zeros(1, np.int32), "q", "test", truth, extra)


def grade_with(manager: RewardManager, texts: Sequence[str], truth: object = "0", group_size: int = 1) -> list[Score]:
    """Grade responses to one prompt, in groups of consecutive ones."""
    for key, text in enumerate(texts):
        start = key - key % group_size
        manager.submit(key, prompt(truth), text, 1, group=range(start, start + group_size))
    scores = manager.collect(range(len(texts)))
    return [scores[key] for key in range(len(texts))]


def graded(config: RewardConfig, texts: Sequence[str], truth: object = "0", group_size: int = 1) -> list[Score]:
    """Grade responses with a manager of their own."""
    with running_manager(config) as manager:
        manager.wait_ready()
        return grade_with(manager, texts, truth, group_size)
