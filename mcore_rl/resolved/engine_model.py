"""Check that the inference engine computes the same model as the trainer. Does not import an engine, so that the driver
can use it."""

from __future__ import annotations

import json
from typing import Any

from mcore_rl.config.algorithm import AlgorithmConfig, is_supervised
from mcore_rl.config.roles import EngineRole
from mcore_rl.config.schema import ModelConfig
from mcore_rl.errors import ConfigError
from model_converters.errors import ConversionError
from model_converters.families import check_for_engine, engine_overrides, missing_engine_fields


def check_engine_model(role: EngineRole, algorithm: AlgorithmConfig, hf_config: dict[str, Any]) -> None:
    """Reject a config.json from which rollout.engine computes another model than transformers and the trainer. A
    supervised run has no engine, so every config.json passes.

    Raises: ConfigError naming the field.
    """
    if is_supervised(algorithm):
        return
    try:
        check_for_engine(hf_config, role.section.engine)
    except ConversionError as error:
        raise ConfigError(f"{role.checkpoint}={role.model.hf_path}: {error}") from error


def overridden_fields(model: ModelConfig, hf_config: dict[str, Any]) -> list[str]:
    """Return a note for the log if engines get values that differ from config.json; [] otherwise."""
    missing = missing_engine_fields(hf_config)
    changed = {key: value for key, value in engine_overrides(hf_config).items() if key not in missing}
    if not changed:
        return []
    values = ", ".join(f"{key}={json.dumps(value)}" for key, value in changed.items())
    note = (
        f"model.hf_path={model.hf_path}: transformers' {hf_config['model_type']} does not use the "
        f"values of some fields of config.json, so the engines of this run get {values}; exports keep the values: "
        "correct config.json before an export is served"
    )
    return [note]
