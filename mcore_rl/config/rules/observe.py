"""Checks of section `observe`."""

from __future__ import annotations

from mcore_rl.config.algorithm import AlgorithmConfig, is_supervised
from mcore_rl.config.fields import reject_unless_default
from mcore_rl.config.observe import ObserveConfig, ProfileConfig
from mcore_rl.config.rules.estimators import OF_PARTS
from mcore_rl.errors import ConfigError


def check_profile(profile: ProfileConfig, num_steps: int, num_ranks: int) -> None:
    """Require that the profiled steps and trainer ranks exist.

    Raises: ConfigError naming the key.
    """
    if not profile.steps:
        reject_unless_default("observe.profile", profile, "set observe.profile.steps", ["ranks"])
        return
    if (last := max(profile.steps)) > num_steps:
        raise ConfigError(f"observe.profile.steps has step {last}, but the run ends after trainer.steps={num_steps}")
    if not profile.ranks:
        raise ConfigError("observe.profile.ranks is empty, so no rank would record a profile; set it to [0]")
    if (highest := max(profile.ranks)) >= num_ranks:
        raise ConfigError(
            f"observe.profile.ranks has rank {highest}, but the run has {num_ranks} trainer ranks, numbered from 0"
        )


def check_trajectories(observe: ObserveConfig, algorithm: AlgorithmConfig) -> None:
    """Require that the run generates the trajectories that it keeps.

    Raises: ConfigError naming the key.
    """
    if observe.keep_trajectories and is_supervised(algorithm):
        raise ConfigError(
            f"observe.keep_trajectories={observe.keep_trajectories} has no effect: supervised training generates no "
            "responses; set it to 0"
        )
    if observe.keep_trajectories and algorithm.uses_sources:
        raise ConfigError(
            f"observe.keep_trajectories={observe.keep_trajectories} does not store the data_source of responses, which "
            "algorithm.per_source and algorithm.baseline=source need to repeat an update; set it to 0"
        )
    if observe.keep_trajectories and algorithm.baseline == "role":
        raise ConfigError(
            f"observe.keep_trajectories={observe.keep_trajectories} does not store the roles of responses, which "
            "algorithm.baseline=role needs to repeat an update; set it to 0"
        )
    if observe.keep_trajectories and algorithm.advantage == OF_PARTS:
        raise ConfigError(
            f"observe.keep_trajectories={observe.keep_trajectories} does not store the parts of the rewards, which "
            f"algorithm.advantage={OF_PARTS} needs to repeat an update; set it to 0"
        )
