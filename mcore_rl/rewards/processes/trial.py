"""One call of a user's reward function before anything else starts, so that a mistake costs a second and not a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mcore_rl.config.functions import names_function
from mcore_rl.config.reward import BATCH, BY_DATA_SOURCE, RewardConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.functions import Sample
from mcore_rl.rewards.graders.catalogue import grader_of
from mcore_rl.rewards.processes.pool import GradingPool
from mcore_rl.types import Prompt, Score, extra_of_turns

BATCH_SIZE = 2
"""Responses that a function of batches is tried on: one compares nothing."""


def rows_to_try(config: RewardConfig, data_sources: Sequence[str]) -> list[int]:
    """Of a prompt set: its first row, and where rows choose their graders, the first of each function of the user's."""
    if all(entry.function != BY_DATA_SOURCE for entry in config.entries):
        return [0]
    graders = {source: grader_of(source, config.functions) or "" for source in dict.fromkeys(data_sources)}
    first = {name: data_sources.index(source) for source, name in reversed(graders.items()) if names_function(name)}
    return sorted(first.values())


def try_reward_function(config: RewardConfig, prompt: Prompt, *, multi_turn: bool = False) -> str | None:
    """Calls it as the run will, in a grading process and with its time limit, on a prompt of data.train: with the
    ground truth as the response, which a correct function is least likely to fail on; where it does, with an empty one.

    extra_info has what a run adds to it: num_turns and tool_rewards, and with `multi_turn` also
    episode_rewards_of_tools.

    Returns a warning if only the empty response could be graded; a run counts such a response as 0.
    Raises: ConfigError with the function's own traceback if neither could.
    """
    specs = [entry.function for entry in config.entries] + list(config.functions.values())
    if not any(map(names_function, specs)):
        return None
    added = {**extra_of_turns(), **({"episode_rewards_of_tools": {}} if multi_turn else {})}
    prompt = replace(prompt, extra_info={**prompt.extra_info, **added})
    pool = GradingPool(replace(config, workers=1))
    try:
        count = BATCH_SIZE if config.manager == BATCH else 1
        right = _graded(pool, prompt, _as_text(prompt.ground_truth), count)
        if right.error is None:
            return None
        empty = _graded(pool, prompt, "", count)
    finally:
        pool.shutdown()
    which = "the first prompt of data.train"
    if prompt.row:
        which += f" with data_source {prompt.data_source!r}"
    told, shown = config.chosen, f"\n{right.traceback}" if right.traceback else ""
    if empty.error is None:
        return (
            f"warning: {told}: called with the ground truth of {which} as the response, "
            f"{right.error}; with an empty one it works. Responses that cannot be graded count 0{shown}"
        )
    raise ConfigError(
        f"{told} cannot grade {which}: with the ground truth as the response, {right.error}; "
        f"with an empty one, {empty.error}. A model writes anything: return a number for every response; or raise "
        f"reward.timeout_seconds={config.timeout_seconds:g} if it needs longer{shown}"
    )


def _graded(pool: GradingPool, prompt: Prompt, response: str, count: int) -> Score:
    sample = Sample(prompt.data_source, response, prompt.ground_truth, prompt.extra_info)
    pool.submit(dict.fromkeys(range(count), sample))
    return pool.collect(range(count))[0]


def _as_text(ground_truth: Any) -> str:
    return ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, default=str)
