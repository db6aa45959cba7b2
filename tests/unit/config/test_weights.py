"""Keys of the weight sync that have no effect or are not supported together."""

from __future__ import annotations

import pytest

from mcore_rl.config.rules.weights import check_weights
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError


def test_check_weights_delta_on_one_host_names_both_keys() -> None:
    config = Config()
    check_weights(config)
    config.weights.delta = True
    with pytest.raises(ConfigError, match=r"weights\.delta=true .* cluster\.nodes=1: .* set it to false"):
        check_weights(config)
    config.cluster.nodes = 2
    check_weights(config)
    config.cluster.nodes, config.weights.transport, config.weights.directory = 1, "files", "/weights"
    check_weights(config)


def test_check_weights_accepts_quantised_deltas_through_files() -> None:
    config = Config()
    config.weights.transport, config.weights.directory, config.weights.delta = "files", "/weights", True
    config.rollout.quantization = "fp8"
    check_weights(config)
