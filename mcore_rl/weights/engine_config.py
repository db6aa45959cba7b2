"""Layout of an inference engine, and fields of config.json that are overridden when it starts."""

from __future__ import annotations

from pathlib import Path

import torch

from mcore_rl.config.quantization import UNQUANTIZED
from mcore_rl.config.roles import POLICY
from mcore_rl.config.sampling import MTP
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.weights.slices.engine_layout import EngineLayout
from model_converters import families
from model_converters.errors import ConversionError
from model_converters.families.parts.hf_config import HFConfig, read_hf_config
from model_converters.hf.fp8_export import quantised_fields
from model_converters.mapping.table import bind


def engine_layout(rollout: RolloutConfig) -> EngineLayout:
    """Return the layout of an engine's rollout.tp ranks."""
    return EngineLayout.of_ranks(
        rollout.tp,
        expert_parallel=rollout.expert_parallel,
        data_parallel_attention=rollout.data_parallel_attention,
        draft_layers=rollout.draft == MTP,
    )


def engine_overrides(
    model_dir: str | Path, *, load_weights: bool, key: str = POLICY.checkpoint, quantization: str = UNQUANTIZED
) -> dict[str, object]:
    """Return the config.json fields that the engine must read with other values than `model_dir` has.

    key: name of the directory in errors. quantization: rollout.quantization, for an engine that gets its weights from
    the trainer.

    Raises: ConfigError for a directory or a model_type that is not supported.
    """
    try:
        hf_config = read_hf_config(model_dir)
        overrides = families.engine_overrides(hf_config)
        # Engines receive weights in the format of rollout.quantization, even if the checkpoint is quantised.
        return overrides if load_weights else overrides | {"quantization_config": _quantised(hf_config, quantization)}
    except ConversionError as error:
        raise ConfigError(f"{key}: {error}") from error


def _quantised(hf_config: HFConfig, quantization: str) -> dict[str, object] | None:
    if quantization == UNQUANTIZED:
        return None
    return quantised_fields(bind(families.family_for(hf_config).rows(hf_config), hf_config, torch.bfloat16))
