"""Trial call of a user's reward function before the run starts, which finds mistakes within seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from mcore_rl.config.functions import names_function
from mcore_rl.config.reward import BATCH, BY_DATA_SOURCE, RewardConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.functions import Sample
from mcore_rl.rewards.graders.catalogue import grader_of
from mcore_rl.rewards.processes.pool import GradingPool
from mcore_rl.types import Prompt, Score, extra_of_turns

BATCH_SIZE = 2
"""Responses in the trial of a batch function, which may compare the responses of a batch."""


def rows_to_try(config: RewardConfig, data_sources: Sequence[str]) -> list[int]:
    """Return the rows of a prompt set to try: the first row, or the first row of every user function if rows choose."""
    if all(entry.function != BY_DATA_SOURCE for entry in config.entries):
        return [0]
    graders = {source: grader_of(source, config.functions) or "" for source in dict.fromkeys(data_sources)}
    first = {name: data_sources.index(source) for source, name in reversed(graders.items()) if names_function(name)}
    return sorted(first.values())


def try_reward_function(config: RewardConfig, prompt: Prompt, *, multi_turn: bool = False) -> str | None:
    """Call the reward function on a prompt of data.train, in a grading process and with its time limit.

    The first response is the ground truth, on which a correct function is least likely to fail; if it fails, the second
    one is empty. extra_info contains the keys that a run adds: num_turns and tool_rewards, and with `multi_turn` also
    episode_rewards_of_tools.

    Returns a warning if only the empty response could be graded; a run scores such responses 0.
    Raises: ConfigError with the function's own traceback if neither could be graded.
    """
    specs = [entry.function for entry in config.entries] + list(config.functions.values())
    if not any(map(names_function, specs)):
        return None
    added = {**extra_of_turns(), **({"episode_rewards_of_tools": {}} if multi_turn else {})}
    prompt = replace(prompt, extra_info={**prompt.extra_info, **added})
    # In a grading process, because the function may hang, die, or change this process.
    pool = GradingPool(replace(config, workers=1))
    try:
        count = BATCH_SIZE if config.manager == BATCH else 1
        right = _graded(pool, prompt, _as_text(prompt.ground_truth), count)
        if right.error is None:
            return None
        empty = _graded(pool, prompt, "", count)
    finally:
        pool.shutdown()
    row = "the first prompt of data.train"
    if prompt.row:
        row += f" with data_source {prompt.data_source!r}"
    chosen, shown = config.chosen, f"\n{right.traceback}" if right.traceback else ""
    if empty.error is None:
        return (
            f"warning: {chosen}: called with the ground truth of {row} as the response, "
            f"{right.error}; with an empty response it works. Responses that cannot be graded count 0{shown}"
        )
    raise ConfigError(
        f"{chosen} cannot grade {row}: with the ground truth as the response, {right.error}; "
        f"with an empty response, {empty.error}. Return a number for every response, because a model may write "
        f"anything; or raise reward.timeout_seconds={config.timeout_seconds:g} if the function needs longer{shown}"
    )


def _graded(pool: GradingPool, prompt: Prompt, response: str, count: int) -> Score:
    sample = Sample(prompt.data_source, response, prompt.ground_truth, prompt.extra_info)
    pool.submit(dict.fromkeys(range(count), sample))
    return pool.collect(range(count))[0]


def _as_text(ground_truth: object) -> str:
    return ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, default=str)
