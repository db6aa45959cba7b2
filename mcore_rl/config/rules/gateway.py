"""Rules for keys of rollout.episode=gateway."""

from __future__ import annotations

from collections.abc import Mapping

from mcore_rl.config.episodes import GATEWAY, SERVING, WITH_ENVIRONMENT, WITH_GATEWAY, harness_is_function
from mcore_rl.config.fields import reject_unless_default, written
from mcore_rl.config.functions import names_function
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError

GATEWAY_KEYS = (
    *("harness", "harness_files", "gateway_address", "gateway_port", "gateway_branches", "gateway_sampling"),
)
"""Keys that have no effect without the gateway."""


def takes_options(rollout: RolloutConfig, episode: str) -> bool:
    """Return whether rollout.episode_kwargs has an effect."""
    if episode == GATEWAY:
        return rollout.harness is not None and harness_is_function(rollout.harness)
    return names_function(episode) or episode == WITH_ENVIRONMENT


def check_gateway(rollout: RolloutConfig, episode: str) -> None:
    """Raise ConfigError for keys of the gateway that contradict each other or have no effect. `episode`: the value of
    rollout.episode or of its default."""
    if episode == SERVING:
        return
    if episode != GATEWAY:
        reject_unless_default("rollout", rollout, f"set rollout.episode={GATEWAY}", GATEWAY_KEYS)
        return
    if rollout.harness is not None and not rollout.harness.strip():
        raise ConfigError("rollout.harness is empty; set it to a command, to module_or_file.py:name, or to null")
    if rollout.harness_files and (rollout.harness is None or harness_is_function(rollout.harness)):
        raise ConfigError(
            f"rollout.harness_files names files of a command, but rollout.harness is {written(rollout.harness)}; "
            "remove rollout.harness_files; a function returns a dict with the values that graders need"
        )
    if rollout.long_history == "drop_turns":
        raise ConfigError(
            f"rollout.long_history=drop_turns is not used by rollout.episode={GATEWAY}: a program shortens its own "
            "history when a request is refused with context_length_exceeded; set rollout.long_history=end"
        )


def check_texts(rollout: RolloutConfig, has_images: Mapping[str, bool]) -> None:
    """Raise ConfigError for rows with images, which programs do not receive. `has_images` by the key of the data."""
    key = next((key for key, has in has_images.items() if has), None)
    if rollout.episode in WITH_GATEWAY and key is not None:
        raise ConfigError(
            f"rollout.episode={rollout.episode} gives no images of rows to programs, and rows of {key} have images; "
            "use data without images and let the programs send them, or a custom episode (docs/episodes.md)"
        )
