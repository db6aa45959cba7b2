"""Values of config.json that an engine gets instead of those in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_rl.config.names import role_key
from mcore_rl.errors import ConfigError
from model_converters import families
from model_converters.errors import ConversionError
from model_converters.families.parts.hf_config import read_hf_config


def engine_overrides(model_dir: str | Path, *, load_weights: bool) -> dict[str, Any]:
    """Fields of config.json that an engine must see with other values than `model_dir` gives them.

    Raises: ConfigError for a directory or a model_type that is not supported.
    """
    try:
        overrides = families.engine_overrides(read_hf_config(model_dir))
    except ConversionError as error:
        raise ConfigError(f"{role_key('model.hf_path')}: {error}") from error
    # The trainer sends its own weights, which are not quantised whatever the directory's are.
    return overrides if load_weights else {**overrides, "quantization_config": None}
