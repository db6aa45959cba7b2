"""Rules for the keys of tools."""

from __future__ import annotations

from mcore_rl.config.rules.changed_keys import reject_unless_default
from mcore_rl.config.schema import RolloutConfig

TOOL_KEYS = (
    *("tool_parser", "tool_processes", "max_tool_seconds", "max_tool_calls_per_turn"),
    *("tool_answer_characters", "tool_answer_keep"),
)
"""Keys that have no effect without tools."""


def check_tool_keys(rollout: RolloutConfig) -> None:
    """Raise ConfigError for a tool key that is set without tools."""
    if rollout.tools is None:
        reject_unless_default("rollout", rollout, "set rollout.tools", TOOL_KEYS)
