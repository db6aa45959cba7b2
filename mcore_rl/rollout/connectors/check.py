"""Check before a run that its rows meet the connector that plays them, and that its package is installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mcore_rl.config.episodes import GATEWAY
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.connectors.interface import CONNECTOR
from mcore_rl.rollout.connectors.libraries import SUITES, check_library

PACKAGE = "mcore_rl.rollout.connectors"
PROGRAM = f"{PACKAGE}.program:solve"
SETTINGS = {
    **dict.fromkeys(SUITES, f"rollout.episode={GATEWAY} and rollout.harness={PROGRAM}"),
    "gymnasium": f"rollout.environment={PACKAGE}.gymnasium:TextEnvironment",
    "openenv": f"rollout.environment={PACKAGE}.openenv:ServerEnvironment",
}
"""Keys that play rows, by their kind."""


def check_rows(rollout: RolloutConfig, key: str, extra_infos: Iterable[Mapping[str, object]]) -> None:
    """Check rows that `mcore-rl rows` has written. key: of the data. extra_infos: of its rows.

    Programs of the user, and workers on other machines, may play any row.

    Raises: ConfigError naming the keys to set, or the package to install.
    """
    for kind in sorted(_kinds(extra_infos)):
        wanted = SETTINGS[kind]
        if rollout.harness == PROGRAM or (rollout.environment or "").startswith(f"{PACKAGE}."):
            is_program = rollout.harness == PROGRAM
            chosen = f"rollout.harness={PROGRAM}" if is_program else f"rollout.environment={rollout.environment}"
            if chosen not in wanted:
                raise ConfigError(f"{key} has rows of {kind}, which {chosen} does not play; set {wanted}")
            try:
                check_library(kind)
            except ConfigError as error:
                raise ConfigError(f"{key} has rows of {kind}: {error}") from error
        elif rollout.episode is None and rollout.environment is None:
            raise ConfigError(f"{key} has rows of {kind}, which no key plays; set {wanted}")


def _kinds(extra_infos: Iterable[Mapping[str, object]]) -> set[str]:
    """Return the kinds of rows; extra_info may have an entry of this name with another meaning."""
    parts = (info.get(CONNECTOR) for info in extra_infos)
    kinds = {part.get("kind") for part in parts if isinstance(part, Mapping)}
    return {kind for kind in kinds if isinstance(kind, str) and kind in SETTINGS}
