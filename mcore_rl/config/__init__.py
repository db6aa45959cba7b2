"""Typed configuration: schema, loading, validation. Imports neither torch nor anything that does."""

from mcore_rl.config.load import known_keys, load_config, write_resolved
from mcore_rl.config.rules.validation import (
    read_hf_config,
    validate,
    validate_critic,
    validate_reward_model,
)
from mcore_rl.config.schema import Config

__all__ = [
    "Config",
    "known_keys",
    "load_config",
    "read_hf_config",
    "validate",
    "validate_critic",
    "validate_reward_model",
    "write_resolved",
]
