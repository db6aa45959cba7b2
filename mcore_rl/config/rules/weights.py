"""Rules for keys of the weight sync."""

from __future__ import annotations

from mcore_rl.config.fields import reject_unless_default
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

FILES = "files"


def check_weights(config: Config) -> None:
    """Raise ConfigError for a key that has no effect, and for files without a directory."""
    weights = config.weights
    if weights.transport != FILES:
        reject_unless_default("weights", weights, f"set weights.transport={FILES}", ("directory",))
    elif not weights.directory:
        raise ConfigError(
            f"weights.transport={FILES} needs weights.directory; set it to a directory that all hosts share, or to a "
            "URL such as s3://bucket/weights"
        )
    if weights.delta and config.cluster.nodes == 1 and weights.transport != FILES:
        raise ConfigError(
            "weights.delta=true has no effect with cluster.nodes=1: it is for weights that are sent between hosts; "
            "set it to false"
        )
