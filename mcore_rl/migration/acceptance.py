"""Check of a translated configuration with the rules that `mcore-rl plan` applies first."""

from __future__ import annotations

from pathlib import Path

from mcore_rl.config.load import load_text
from mcore_rl.config.rules.validation import validate, validate_critic, validate_keys
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError


def rejection(text: str) -> str | None:
    """Return the message that rejects the configuration, or None. Rules about the model's sizes are applied if its
    config.json is on this machine."""
    try:
        _check(load_text(text, needs_data=False))
    except ConfigError as error:
        return str(error)
    return None


def _check(config: Config) -> None:
    if not has_model(config):
        validate_keys(config, run_here=False)
        return
    validate(config, run_here=False)
    if config.algorithm.advantage == "gae" and config.critic.hf_path is None:
        validate_critic(config)


def has_model(config: Config) -> bool:
    """Return True if the model's config.json is on this machine."""
    return (Path(config.model.hf_path) / "config.json").is_file()
