"""Typed configuration: schema, loading, validation. Imports neither torch nor anything that does."""

from mcore_rl.config.load import load_config
from mcore_rl.config.schema import Config

__all__ = ["Config", "load_config"]
