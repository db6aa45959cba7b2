"""Rules for episode keys, and the type of episode that they select."""

from __future__ import annotations

from mcore_rl.config.algorithm import AlgorithmConfig, is_supervised
from mcore_rl.config.episodes import SINGLE_TURN, WITH_ENVIRONMENT, WITH_TOOLS
from mcore_rl.config.functions import names_function
from mcore_rl.config.rules.changed_keys import reject_unless_default
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError

TURN_KEYS = (
    *("max_turns", "max_turn_tokens", "max_episode_seconds", "max_concurrent_episodes"),
    *("failed_reward", "history", "long_history"),
)
"""Keys that have no effect on single-turn episodes."""
TOOL_KEYS = (
    *("tool_parser", "tool_processes", "max_tool_seconds", "max_tool_calls_per_turn"),
    *("tool_answer_characters", "tool_answer_keep"),
)
"""Keys that have no effect without tools."""
EPISODES_PER_REQUEST = 4
"""Default number of running episodes per request that an engine decodes."""


def episode_of(rollout: RolloutConfig) -> str:
    """Return the value of rollout.episode, or of its default."""
    if rollout.episode is not None:
        return rollout.episode
    if rollout.environment is not None:
        return WITH_ENVIRONMENT
    return WITH_TOOLS if rollout.tools is not None else SINGLE_TURN


def has_turns(rollout: RolloutConfig) -> bool:
    """Return True if an episode may have more than one turn."""
    return episode_of(rollout) != SINGLE_TURN


def concurrent_episodes(rollout: RolloutConfig) -> int:
    """Return the maximum number of running episodes per engine; single turns are limited by the requests that it
    decodes."""
    if not has_turns(rollout):
        return rollout.max_concurrent_requests
    return rollout.max_concurrent_episodes or EPISODES_PER_REQUEST * rollout.max_concurrent_requests


def check_episodes(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError naming keys that contradict each other."""
    chosen = episode_of(rollout)
    if is_supervised(algorithm):
        return
    if chosen == WITH_TOOLS and rollout.tools is None:
        raise ConfigError("rollout.episode=tools needs rollout.tools: a YAML file of tools, or module_or_file.py:name")
    if chosen == WITH_ENVIRONMENT and rollout.environment is None:
        raise ConfigError("rollout.episode=environment needs rollout.environment=module_or_file.py:name of its class")
    if rollout.environment is not None and chosen != WITH_ENVIRONMENT:
        raise ConfigError(
            f"rollout.environment={rollout.environment} is not used by rollout.episode={chosen}; remove one of them"
        )
    if rollout.tools is not None and chosen in (SINGLE_TURN, WITH_ENVIRONMENT):
        raise ConfigError(f"rollout.tools={rollout.tools} is not used by rollout.episode={chosen}; remove it")
    if rollout.episode_kwargs and not (names_function(chosen) or chosen == WITH_ENVIRONMENT):
        raise ConfigError(f"rollout.episode_kwargs is not used by rollout.episode={chosen}; remove it")
    if chosen == SINGLE_TURN:
        remedy = "set rollout.episode, rollout.tools or rollout.environment"
        reject_unless_default("rollout", rollout, remedy, TURN_KEYS)
    _check_limits(rollout)


def check_tool_keys(rollout: RolloutConfig) -> None:
    """Raise ConfigError for a tool key that is set without tools."""
    if rollout.tools is None:
        reject_unless_default("rollout", rollout, "set rollout.tools", TOOL_KEYS)


def _check_limits(rollout: RolloutConfig) -> None:
    turn, response = rollout.max_turn_tokens, rollout.max_response_tokens
    if turn is not None and turn > response:
        raise ConfigError(
            f"rollout.max_turn_tokens={turn} exceeds rollout.max_response_tokens={response}, which counts all turns of "
            "an episode and the messages between them; lower it"
        )
    seconds, tool_seconds = rollout.max_episode_seconds, rollout.max_tool_seconds
    if seconds is not None and rollout.tools is not None and tool_seconds > seconds:
        raise ConfigError(
            f"rollout.max_tool_seconds={tool_seconds:g} exceeds rollout.max_episode_seconds={seconds:g}; lower it"
        )
