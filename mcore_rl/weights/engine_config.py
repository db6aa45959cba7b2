"""Fields of config.json that are overridden when an inference engine starts."""

from __future__ import annotations

from pathlib import Path

from mcore_rl.config.roles import POLICY
from mcore_rl.errors import ConfigError
from model_converters import families
from model_converters.errors import ConversionError
from model_converters.families.parts.hf_config import read_hf_config


def engine_overrides(model_dir: str | Path, *, load_weights: bool, key: str = POLICY.checkpoint) -> dict[str, object]:
    """Return the config.json fields that the engine must read with other values than `model_dir` has.

    `key` names the directory in errors.

    Raises: ConfigError for a directory or a model_type that is not supported.
    """
    try:
        overrides = families.engine_overrides(read_hf_config(model_dir))
    except ConversionError as error:
        raise ConfigError(f"{key}: {error}") from error
    # The trainer sends unquantized weights even if the checkpoint in the directory is quantized.
    return overrides if load_weights else {**overrides, "quantization_config": None}
