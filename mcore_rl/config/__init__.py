"""Typed configuration: schema, loading, validation. Imports neither torch nor anything that does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_rl.config.load import load_config
    from mcore_rl.config.schema import Config

__all__ = ["Config", "load_config"]


def __getattr__(name: str) -> object:
    # On access: SGLang's ranks import constants of this package in an environment without OmegaConf.
    if name == "load_config":
        from mcore_rl.config.load import load_config

        return load_config
    if name == "Config":
        from mcore_rl.config.schema import Config

        return Config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
